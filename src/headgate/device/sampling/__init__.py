"""From logits to tokens: sampling, log-probabilities and grammars."""
