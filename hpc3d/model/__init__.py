"""GPT-2, Llama and BERT with hand-written backward passes, built on the sharded product."""
