"""A Lightning loop that logs the loss of every step to the progress bar; cured: the mean of an epoch."""

import lightning
import torch
from common import Clock, cured, device, loader, net, steps

clock = Clock()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, number):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        if cured:
            self.log("loss", loss, on_step=False, on_epoch=True)
        else:
            self.log("loss", loss, on_step=True, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, number):
        clock()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


model = Classifier()
trainer = lightning.Trainer(
    max_steps=steps,
    accelerator="gpu" if device.type == "cuda" else "cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    log_every_n_steps=50 if cured else 1,
)
trainer.fit(model, loader(pinned=True))
clock.report(model)
