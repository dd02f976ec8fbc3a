//! The forms whose machine code is looked at without a GPU.

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use super::form::units;
use super::gather::VECTOR;
use super::sparse_sm90_kernel;
use crate::offline::{Arch, Entry, buffer};
use crate::sparse_mla::codes::RowPagesLaunch;
use crate::sparse_mla::form::{Causal, Form, Stored, Writes};
use crate::sparse_mla::launch::query_map;
use crate::sparse_mla::work::PagedKeysLaunch;
use crate::tiles::output::COLUMNS;

pub(in crate::sparse_mla) fn offline() -> Vec<crate::offline::Entry> {
    let entry = |name: &str, form: Form, address: AddressType| {
        let elem = ElemType::Float(if form.tile.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
        Entry::new(format!("sparse_mla.sm90.{}.{name}", form.tile.elem().name()), move |device, target| {
            sparse_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(units(form)),
                address,
                COLUMNS,
                VECTOR,
                query_map(buffer(), form.tile, 64, elem).expect("made of a handle"),
                buffer(),
                buffer(),
                RowPagesLaunch::new(1, 1),
                buffer(),
                buffer(),
                buffer(),
                buffer(),
                RowPagesLaunch::new(1, 1),
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
                1,
                PagedKeysLaunch::new(1, 1, 1, 1),
                1.0,
                1,
                form,
                elem,
            )
        })
        .on(|arch| arch == Arch::Sm90a)
        .unchecked()
    };
    let models = Form::of_models();
    let v32 = models[0].1;
    let v4 = models.iter().find(|(name, _)| *name == "512.two").expect("a model has it").1;
    let fp8 = Form { rows: [Stored::V3; 2], ..v32 };
    let fp8_v4 = Form { rows: [Stored::V4; 2], ..v4 };
    let entries = Form { rows: [Stored::Dense, Stored::V4], ..v4 };
    let pages = Form { pages: Some(Causal(true)), writes: Writes::Planned, ..fp8 };
    let own = [
        ("576.fp8", fp8),
        ("576.fp8.pair", Form { pair: true, ..fp8 }),
        ("576.fp8.pages.pair", Form { pair: true, ..pages }),
        ("576.fp8.split", Form { lengths: [true, false], writes: Writes::Split, ..fp8 }),
        ("576.fp8.pages", pages),
        ("576.fp8.two", Form { second: true, sink: true, lengths: [true; 2], ..fp8 }),
        ("512.fp8.two", fp8_v4),
        ("512.fp8.two.pair", Form { pair: true, ..fp8_v4 }),
        ("512.fp8.two.split", Form { writes: Writes::Split, ..fp8_v4 }),
        ("512.fp8.entries", entries),
        ("512.fp8.entries.pair", Form { pair: true, ..entries }),
        ("512.fp8.entries.split", Form { writes: Writes::Split, ..entries }),
        ("512.fp8.entries.merge", Form { writes: Writes::Split, merging: 8, ..entries }),
        ("512.two.merge", Form { writes: Writes::Split, merging: 8, ..v4 }),
    ];
    let large = [("576.large", v32), ("576.fp8.large", fp8)];
    let small = models.into_iter().chain(own).map(|(name, form)| {
        // f16 with offsets of 64 bits.
        entry(name, form, if form.tile.bf16 { AddressType::U32 } else { AddressType::U64 })
    });
    small.chain(large.map(|(name, form)| entry(name, form, AddressType::U64))).collect()
}
