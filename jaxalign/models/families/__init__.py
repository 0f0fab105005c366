"""Model families in the Hugging Face layout: one short file each, with the config and the weight names."""
