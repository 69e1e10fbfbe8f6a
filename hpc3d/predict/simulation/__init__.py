"""The program itself on abstract arrays and a machine's clock."""
