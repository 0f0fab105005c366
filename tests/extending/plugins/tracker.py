"""A tracker: one line of text per step, in the file that the environment variable TRACKED names."""

import os


class Lines:
    def start(self, config):
        self.stage = config["stage"]
        self.file = open(os.environ["TRACKED"], "a", buffering=1)
        self.file.write(f"{self.stage} starts at {config['step']}, seed {config['seed']}\n")

    def log(self, step, metrics):
        self.file.write(f"{self.stage} {step} loss {metrics['loss']}\n")

    def finish(self, status):
        self.file.write(f"{self.stage} {status}\n")
        self.file.close()
