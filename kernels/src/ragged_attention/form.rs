//! What the code of the kernels for matrix instructions depends on.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use super::problem::{RaggedAttentionOptions, RaggedAttentionSizes};
use crate::ptx::wgmma::Elem;

/// Channels of a panel: 128 bytes, all banks of shared memory, and the width of Hopper's swizzle.
pub(super) const PANEL: usize = 64;

/// What a kernel's code depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
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
    /// The form for a problem, where the kernels take it.
    pub(super) fn of(sizes: &RaggedAttentionSizes) -> Option<Self> {
        let &RaggedAttentionSizes { heads, kv_heads, key_width, value_width, shared_width, elem, .. } = sizes;
        let bf16 = match elem {
            ElemType::Float(FloatKind::BF16) => true,
            ElemType::Float(FloatKind::F16) => false,
            _ => return None,
        };
        let widths = matches!((key_width, value_width), (192, 128) | (128, 128) | (64, 64));
        let shared = shared_width == 0 || (shared_width == PANEL && key_width > PANEL);
        let grouped = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        (widths && shared && grouped).then_some(Self {
            key_panels: key_width / PANEL,
            value_panels: value_width / PANEL,
            shared_panels: shared_width / PANEL,
            bf16,
            negative: false,
            capped: false,
            windowed: false,
        })
    }

    /// The same with these options.
    pub(super) fn with(self, options: &RaggedAttentionOptions) -> Self {
        let capped = options.softcap.is_some();
        Self { negative: !capped && options.softmax_scale < 0.0, capped, windowed: options.window.is_some(), ..self }
    }

    pub(super) fn elem(self) -> Elem {
        if self.bf16 { Elem::Bf16 } else { Elem::F16 }
    }
}
