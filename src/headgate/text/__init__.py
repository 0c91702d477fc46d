"""What the words are: tokenizer, chat template, incremental detokenizer, stop strings. The only place that knows text."""
