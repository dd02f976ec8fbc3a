//! The kernel as the offline check compiles it.

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use super::decode_fp8_kernel;
use super::form::Form;
use super::query::VECTOR;
use crate::offline::{Arch, Entry, buffer};
use crate::tiles::output::COLUMNS;

pub(in crate::mla_decode) fn offline() -> Vec<Entry> {
    let entry = |form: Form| {
        Entry::new(format!("mla_decode.fp8.{}", form.rows()), move |device, target| {
            decode_fp8_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(form.units()),
                AddressType::U32,
                VECTOR,
                COLUMNS,
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                1,
                1,
                1,
                1,
                1,
                1.0,
                1,
                form,
                ElemType::Float(FloatKind::BF16),
            )
        })
        .on(|arch| matches!(arch, Arch::Sm90a | Arch::Sm100a))
        .unchecked()
    };
    vec![entry(Form { tiles: 1, causal: true }), entry(Form { tiles: 2, causal: false })]
}
