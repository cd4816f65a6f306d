"""The recipe of the embedded model pair: corpus, training, evaluation, model card."""
