"""GPT-2, Llama and BERT with hand-written backward passes and sharded matrix products."""
