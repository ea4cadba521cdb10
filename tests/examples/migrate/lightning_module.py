"""The autoencoder of Lightning's first tutorial, on digits: python lightning_module.py"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from steadfast import Config
from steadfast.lightning import fit_module


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        found = self.decoder(self.encoder(batch[0]))
        self.log_dict({"val_loss": mse_loss(found, batch[0]), "largest": found.amax(1).mean()})

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)}


pixels, _ = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16).float())
train_set, test_set = TensorDataset(*digits[:1536]), TensorDataset(*digits[1536:])
config = Config(
    run={"name": "autoencoder", "epochs": 4},
    batch={"global_size": 64, "microbatch_size": 32},
    optimizer={"max_grad_norm": 1.0},
    validation={"every": "1 epoch"},
    checkpoint={"every": "10 steps"},
)

if __name__ == "__main__":
    torch.manual_seed(0)
    result = fit_module(config, Autoencoder(), dataset=train_set, validation=test_set, order="sequential")
    metrics = result.summary["metrics"]
    print(f"loss {metrics['loss']:.6f}, largest {metrics['largest']:.6f}")
