//! The forms whose machine code is looked at without a GPU.

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use super::form::{Causal, Form, Stored, Writes};
use super::fp8::RowPagesLaunch;
use super::gather::VECTOR;
use super::work::PagedKeysLaunch;
use super::{query_map, sparse_sm90_kernel};
use crate::offline::{Arch, Entry, buffer};
use crate::sparse_mla::merge;
use crate::tiles::form::Form as TileForm;
use crate::tiles::output::COLUMNS;

pub(in crate::sparse_mla) fn offline() -> Vec<crate::offline::Entry> {
    let entry = |name: &str, form: Form, address: AddressType| {
        let elem = ElemType::Float(if form.tile.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
        Entry::new(format!("sparse_mla.sm90.{}.{name}", form.tile.elem().name()), move |device, target| {
            sparse_sm90_kernel::create_dummy_kernel(
                device,
                target,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(form.units()),
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
    let tile = |tiles, bf16| TileForm { tiles, box_keys: 1, bf16, causal: false };
    let v32 = Form {
        tile: tile(9, true),
        second: false,
        lengths: [false; 2],
        sink: false,
        rows: [Stored::Dense; 2],
        pair: false,
        pages: None,
        writes: Writes::Whole,
    };
    let v4 = Form { tile: tile(8, true), second: true, lengths: [false, true], sink: true, ..v32 };
    let fp8 = Form { rows: [Stored::V3; 2], ..v32 };
    let fp8_v4 = Form { rows: [Stored::V4; 2], ..v4 };
    let entries = Form { rows: [Stored::Dense, Stored::V4], ..v4 };
    [
        entry("576", v32, AddressType::U32),
        entry("576.large", v32, AddressType::U64),
        entry("576.split", Form { lengths: [true, false], writes: Writes::Split, ..v32 }, AddressType::U32),
        entry("576.plan", Form { lengths: [true, false], writes: Writes::Planned, ..v32 }, AddressType::U32),
        entry("576.fp8", fp8, AddressType::U32),
        entry("576.fp8.pair", Form { pair: true, ..fp8 }, AddressType::U32),
        entry(
            "576.fp8.pages.pair",
            Form { pair: true, pages: Some(Causal(true)), writes: Writes::Planned, ..fp8 },
            AddressType::U32,
        ),
        entry("576.fp8.large", fp8, AddressType::U64),
        entry("576.fp8.split", Form { lengths: [true, false], writes: Writes::Split, ..fp8 }, AddressType::U32),
        entry("576.fp8.pages", Form { pages: Some(Causal(true)), writes: Writes::Planned, ..fp8 }, AddressType::U32),
        entry("576.fp8.two", Form { second: true, sink: true, lengths: [true; 2], ..fp8 }, AddressType::U32),
        entry("512.two", v4, AddressType::U32),
        entry("512.two.split", Form { writes: Writes::Split, ..v4 }, AddressType::U32),
        entry("512.two.plan", Form { writes: Writes::Planned, ..v4 }, AddressType::U32),
        entry("512.two.parts", Form { sink: false, writes: Writes::Parts, ..v4 }, AddressType::U32),
        entry("512.fp8.two", fp8_v4, AddressType::U32),
        entry("512.fp8.two.pair", Form { pair: true, ..fp8_v4 }, AddressType::U32),
        entry("512.fp8.two.split", Form { writes: Writes::Split, ..fp8_v4 }, AddressType::U32),
        entry("512.fp8.entries", entries, AddressType::U32),
        entry("512.fp8.entries.pair", Form { pair: true, ..entries }, AddressType::U32),
        entry("512.fp8.entries.split", Form { writes: Writes::Split, ..entries }, AddressType::U32),
        entry("576.two", Form { tile: tile(9, false), lengths: [true; 2], ..v4 }, AddressType::U64),
    ]
    .into_iter()
    .chain(merge::offline())
    .collect()
}
