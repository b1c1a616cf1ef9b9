"""Storage writers and readers of torch's protocol: files of its layout, fsspec, Hugging Face safetensors."""
