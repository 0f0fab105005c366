"""The built-in trackers: TensorBoard, Weights & Biases, MLflow and trackio. Each imports its library when it starts."""
