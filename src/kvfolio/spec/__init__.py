"""What a model remembers: layer kinds, storage formats, model descriptions and how to read them. No tensors."""
