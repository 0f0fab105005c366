"""Model families in Hugging Face layout: one short file each, a config and a weight-name map."""
