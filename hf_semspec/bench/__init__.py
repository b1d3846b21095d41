"""The measuring side: pairs of models with a chosen agreement, interleaved timings, and the pages made from them."""
