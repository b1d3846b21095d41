"""What the command `hf-semspec` starts.

A module of its own, for `import hf_semspec` imports transformers, and that whatever else is installed: what those
libraries then say about themselves is no concern of the command's user.
"""

import logging
import sys

# Which of their own binaries they could not load, and deprecations among themselves.
CHATTY = ("torchao", "torch.utils._pytree", "bitsandbytes")


def main() -> int:
    """Run the command line; its exit status."""
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from hf_semspec.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
