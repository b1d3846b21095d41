"""The schemes: one file each, its `decode` reads like its algorithm box; none imports another."""

from . import easd, lossless, smc

SCHEMES = {"lossless": lossless.decode, "easd": easd.decode, "smc": smc.decode}
