//! What the code of the kernels for matrix instructions depends on.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::ptx::wgmma::Elem;

/// Channels of a panel: 128 bytes, all banks of shared memory, and the width of Hopper's swizzle.
pub(crate) const PANEL: usize = 64;

/// What a kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    /// Query rows of a tile.
    pub rows: usize,
    /// Panels of a query and a key.
    pub key_panels: usize,
    /// Panels of a value.
    pub value_panels: usize,
    /// Panels of a key, the last ones, that all heads share.
    pub shared_panels: usize,
    /// bf16, otherwise f16.
    pub bf16: bool,
    /// Whether the factor of the scores is negative; where they are not capped.
    pub negative: bool,
    /// Whether scores are capped.
    pub capped: bool,
    /// Whether a query sees only its last keys.
    pub windowed: bool,
}

impl Form {
    /// For tiles of so many queries, where the kernels take the type and the channels of keys, of values, and of keys those that all
    /// heads share.
    pub fn of(rows: usize, elem: ElemType, [key_width, value_width, shared_width]: [usize; 3]) -> Option<Self> {
        let bf16 = match elem {
            ElemType::Float(FloatKind::BF16) => true,
            ElemType::Float(FloatKind::F16) => false,
            _ => return None,
        };
        let widths = matches!((key_width, value_width), (192, 128) | (128, 128) | (64, 64));
        let shared = shared_width == 0 || (shared_width == PANEL && key_width > PANEL);
        (widths && shared).then(|| Self::plain(rows, [key_width, value_width, shared_width].map(|it| it / PANEL), bf16))
    }

    /// With scores that are neither turned around nor capped, of all keys; panels of keys, of values, and those that heads share.
    pub fn plain(rows: usize, [key_panels, value_panels, shared_panels]: [usize; 3], bf16: bool) -> Self {
        let (negative, capped, windowed) = (false, false, false);
        Self { rows, key_panels, value_panels, shared_panels, bf16, negative, capped, windowed }
    }

    /// The same with this factor and cap of the scores.
    pub fn with_scores(self, softmax_scale: f32, softcap: Option<f32>) -> Self {
        let capped = softcap.is_some();
        Self { negative: !capped && softmax_scale < 0.0, capped, ..self }
    }

    pub fn elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }
}
