"""Hand-written GPT-2, Llama and BERT, forward and backward, on the sharded product."""
