"""Text on either side of token ids: tokenizers, chat templates, incremental detokenising. No torch."""
