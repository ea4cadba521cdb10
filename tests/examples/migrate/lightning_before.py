"""Digits by Lightning: python lightning_before.py"""

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]
pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
train_set, test_set = TensorDataset(*digits[:1536]), TensorDataset(*digits[1536:])


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Batch, index: int) -> None:
        logits = self.layers(batch[0])
        self.log("loss", cross_entropy(logits, batch[1]))
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 48, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Report(Callback):
    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        print(trainer.global_step, trainer.callback_metrics["accuracy"].item())


lightning.seed_everything(0)
trainer = lightning.Trainer(
    max_epochs=4,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[Report(), EarlyStopping("loss", patience=3), ModelCheckpoint(monitor="loss")],
)
trainer.fit(Classifier(), DataLoader(train_set, batch_size=32), DataLoader(test_set, batch_size=32))
