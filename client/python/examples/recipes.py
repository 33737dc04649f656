"""How king_james.py trains: the model of each recipe, its layers, and the optimizer's options.

    plain         weights and gradients in fp32
    switchback    linear layers in int8 (arXiv 2304.13013); their weights are served in int8, gradients travel in bf16
    fp8           linear layers in fp8 with a loss scale; their weights are served in e4m3, gradients travel in e5m2
    unit-scaled   the unit-scaled model (arXiv 2303.11257, 2407.17465) in fp8 without a loss scale; likewise
    collage       a model in bf16, whose weights the daemon keeps in two bf16 (arXiv 2405.03637)

With torch's AdamW a recipe is its model in fp32, which is what the other is compared with.
"""

import sys

import torch
from torch import nn

# How large gradients of "fp8" are made, so that e5m2 holds them: a mean over 2,048 bytes is small.
LOSS_SCALE = 2.0**14


class UnitScaledByteModel(nn.Module):
    """king_james.ByteModel of the package unit-scaling's layers: activations, weights and gradients have about the scale 1.
    Its perceptrons have a gate (SwiGLU), and so it has 1.13 million parameters."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 128):
        super().__init__()
        try:
            import unit_scaling as uu
        except ModuleNotFoundError:
            sys.exit("recipe unit-scaled needs the package unit-scaling: pip install unit-scaling")
        self.package = uu
        self.token, self.position = uu.Embedding(256, width), uu.Embedding(context, width)
        self.layers = uu.TransformerDecoder(width, 256, layers, heads).layers
        self.norm, self.head = uu.RMSNorm(width), uu.LinearReadout(width, 256)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.package.functional.residual_add(self.position(places), self.token(tokens))
        return self.head(self.norm(self.layers(x)))

    def loss(self, batch):
        inputs, targets = batch
        return self.package.functional.cross_entropy(self(inputs).flatten(0, 1).float(), targets.flatten())


class Recipe:
    """make_model(): in fp32; plain: makes one of nn.Linear. switch(): from now on its layers are those of the recipe, for
    Ballast; returns the optimizer's options that go with them. rates(): learning rates in place of the usual ones."""

    rule = "AdamW"

    def make_model(self, plain) -> nn.Module:
        return plain()

    def switch(self, model: nn.Module) -> dict:
        return {}

    def rates(self, model: nn.Module) -> dict:
        return {}

    def by_torch(self, model: nn.Module, learning: dict) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **learning)


class Switchback(Recipe):
    def switch(self, model):
        from ballast import nn as layers

        layers.switch(model, "layers.*")
        return {"formats": layers.served_formats(model), "gradient_dtype": "bf16"}


class Fp8(Recipe):
    def switch(self, model):
        from ballast import nn as layers

        layers.switch(model, "layers.*", layers.Float8Linear, scale=None)
        return {"formats": layers.served_formats(model), "gradient_dtype": "fp8-e5m2", "loss_scale": LOSS_SCALE}


class UnitScaled(Recipe):
    """One learning rate for any width and depth: what it is of each tensor is the package's rule."""

    LR = 0.5

    def make_model(self, plain):
        return UnitScaledByteModel()

    def switch(self, model):
        from ballast import nn as layers

        layers.switch(model, "layers.*", layers.UnitScaledFloat8Linear)
        return {"formats": layers.served_formats(model), "gradient_dtype": "fp8-e5m2"}

    def rates(self, model):
        import ballast

        depth = len(model.layers)
        within = ballast.umup_scales(model.layers.named_parameters(prefix="layers"), depth)
        around = [(name, p) for name, p in model.named_parameters() if name not in within]
        outside = ballast.umup_scales(around, 1, embedding=["token.*", "position.*"], output=["head.*"])
        return {"lr": self.LR, "weight_decay": 0.0, "lr_scales": {**within, **outside}}

    def by_torch(self, model, learning):
        from unit_scaling.optim import lr_scale_func_adam, scaled_parameters

        groups = scaled_parameters(model.parameters(), lr_scale_func_adam, lr=self.LR, weight_decay=0.0)
        return torch.optim.AdamW(groups, betas=learning["betas"], eps=learning["eps"])


class Collage(Recipe):
    rule = "CollagePlus"

    def switch(self, model):
        model.bfloat16()
        return {}


RECIPES = {
    "plain": Recipe(),
    "switchback": Switchback(),
    "fp8": Fp8(),
    "unit-scaled": UnitScaled(),
    "collage": Collage(),
}


def codes_of(model: nn.Module) -> list[torch.Tensor]:
    """The codes and scales that its layers multiply in place of their weights."""
    served = [layer.served for layer in model.modules() if getattr(layer, "served", None) is not None]
    return [part for one in served for part in (one.codes, one.scales)]
