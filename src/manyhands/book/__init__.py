"""The names, models and data of the book "Dive into Deep Learning": ``manyhands.book.torch``, and so on."""

# Beside `Trainer`, `load_model` and `load_weights`, which are names of ours, too.
NAMES = (
    *("Accumulator", "Animator", "Benchmark", "DataModule", "HyperParameters", "Module", "Residual", "Timer"),
    *("accuracy", "add_to_class", "evaluate_accuracy_gpu", "evaluate_accuracy_gpus", "lenet"),
    *("load_data_fashion_mnist", "resnet18", "split_batch", "train"),
)
