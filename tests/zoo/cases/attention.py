"""Attention over pictures and sounds, and torch's own layers of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.models import Records
from tests.zoo.cases.language import TIED, made
from tests.zoo.cases.losses import OVER_THE_BATCH
from tests.zoo.cases.losses import clip as contrast
from tests.zoo.row import Row
from tests.zoo.samples import WORDS, images, sentences, translations

__all__ = ["ROWS"]

_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
_PATCHES = {"image_size": 8, "patch_size": 4, "num_channels": 3}


def pictures(count: int) -> Records:
    """pixel_values and labels."""
    return Records([{"pixel_values": x, "labels": y} for x, y in images(count)])


def scenes(count: int) -> Records:
    """32 x 32 pixels with a class each, of which some are 255: nothing to learn there."""
    drawn = torch.Generator().manual_seed(13)
    items = []
    for x, _ in images(count, size=32):
        labels = torch.randint(0, 3, (32, 32), generator=drawn)
        labels[torch.rand(32, 32, generator=drawn) < torch.rand(1, generator=drawn)] = 255
        items.append({"pixel_values": x, "labels": labels})
    return Records(items)


def recordings(count: int) -> Records:
    """Signals of 160 numbers, and four letters of each, fewer where -100 pads them."""
    drawn = torch.Generator().manual_seed(19)
    rows = [
        {
            "input_values": torch.randn(160, generator=drawn),
            "labels": torch.randint(3, WORDS, (4,), generator=drawn),
        }
        for _ in range(count)
    ]
    for at, row in enumerate(rows):
        row["labels"][4 - at % 3 :] = -100
    return Records(rows)


def speeches(count: int) -> Records:
    """Spectra of 20 bands and 16 frames, and the words that were spoken."""
    drawn = torch.Generator().manual_seed(14)
    rows = translations(count).items
    return Records(
        [{"input_features": torch.randn(20, 16, generator=drawn), "labels": item["labels"]} for item in rows]
    )


def captions(count: int) -> Records:
    """A sentence and a picture, which belong together."""
    rows = sentences(count, padded=True, mask=True).items
    named = [{name: item[name] for name in ("input_ids", "attention_mask")} for item in rows]
    return Records([{**item, "pixel_values": x} for item, (x, _) in zip(named, images(count), strict=True)])


def clip() -> nn.Module:
    """Returns its contrastive loss, without a switch that a batch would have to carry."""
    from transformers import CLIPConfig, CLIPModel

    words = {**_SMALL, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}

    class WithLoss(CLIPModel):
        def forward(self, input_ids: Any, attention_mask: Any, pixel_values: Any) -> torch.Tensor:
            return super().forward(input_ids, pixel_values, attention_mask, return_loss=True).loss

    return WithLoss(CLIPConfig(text_config=words, vision_config={**_SMALL, **_PATCHES}, projection_dim=8))


class Embeddings(nn.Module):
    """CLIP without its loss: what a loss_fn over the mini-batch needs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = clip()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        from transformers import CLIPModel

        found = CLIPModel.forward(self.clip, input_ids, pixel_values, attention_mask)
        scale = self.clip.logit_scale.exp()
        return {"image": found.image_embeds, "text": found.text_embeds, "scale": scale}


def captioned(count: int) -> TensorDataset:
    """As ``captions``, with a target that no loss reads."""
    items = captions(count).items
    names = ("input_ids", "attention_mask", "pixel_values")
    return TensorDataset(*(torch.stack([item[name] for item in items]) for name in names), torch.zeros(count))


class Translator(nn.Module):
    """nn.Transformer from ids to ids, both with padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.answer = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, 0.1, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        before = functional.pad(labels[:, :-1].clamp(min=0), (1, 0))
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        ahead = self.body(
            self.embed(input_ids),
            self.answer(before),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=input_ids == 7,
        )
        return functional.cross_entropy(self.head(ahead).flatten(0, 1), labels.flatten())


row = partial(Row, "attention")


def own(model: str, build: Callable[[], nn.Module], data: Any, words: str, *verdict: Any, **more: Any) -> Row:
    return row(model, build, data, None, "its own", words, *verdict, **more)


ROWS = (
    own("nn.Transformer, encoder and decoder", Translator, translations, "translations, -100", stages=3),
    own("ViT", made("ViTForImageClassification", **_SMALL, **_PATCHES, num_labels=5, hidden_dropout_prob=0.1), pictures,
        "images", stages=3),
    own("Swin", made("SwinForImageClassification", image_size=8, patch_size=2, embed_dim=8, depths=[1, 1],
        num_heads=[1, 2], window_size=2, drop_path_rate=0.2, num_labels=5), pictures, "images"),
    own("Segformer", made("SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[8, 8], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=8, num_labels=3), scenes, "scenes, pixels of 255 ignored"),
    own("Whisper", made("WhisperForConditionalGeneration", vocab_size=WORDS, num_mel_bins=20, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=8, max_target_positions=8, dropout=0.1, use_cache=False,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2), speeches,
        "spectra and words, -100", TIED),
    own("Wav2Vec2 (CTC), no LayerDrop", made("Wav2Vec2ForCTC", vocab_size=WORDS, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0,
        apply_spec_augment=False, pad_token_id=0), recordings, "signals, letters, -100"),
    own("CLIP", clip, captions, "captions", OVER_THE_BATCH, microbatches=(4,), evaluated=8, stages=3),
    own("CLIP, one micro-batch", clip, captions, "captions", microbatches=(1,), evaluated=8),
    row("CLIP, embeddings", Embeddings, captioned, contrast, "CLIP, temperature", "captions", microbatches=(4,),
        evaluated=8, stages=3, note="over the whole mini-batch"),
)  # fmt: skip
"""Pictures, sounds, and torch's own layers."""
