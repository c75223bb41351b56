"""Planning without a GPU, without weights and without other ranks."""
