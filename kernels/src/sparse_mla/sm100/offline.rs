//! The forms whose machine code is looked at without a GPU.

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use super::{pair, rows_map, single, sparse_sm100_kernel, sparse_sm100_pair_kernel};
use crate::offline::{Arch, Entry, buffer, form};
use crate::sparse_mla::codes::RowPagesLaunch;
use crate::sparse_mla::form::{Causal, Form, Stored, Writes};
use crate::sparse_mla::launch::query_map;
use crate::sparse_mla::work::PagedKeysLaunch;
use crate::tiles::output::COLUMNS;

pub(in crate::sparse_mla) fn offline() -> Vec<Entry> {
    macro_rules! entry {
        ($kernel:ident, $units:path, $of:literal, $name:expr, $form:expr) => {{
            let form: Form = $form;
            let elem = ElemType::Float(if form.tile.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
            let query = move || query_map(buffer(), form.tile, 64, elem).expect("made of a handle");
            let rows =
                move |list: usize| rows_map(buffer(), form.tile, form.rows[list], 64, elem).expect("made of a handle");
            let row_pages = || RowPagesLaunch::new(1, 1);
            let pages = || PagedKeysLaunch::new(1, 1, 1, 1);
            let (bits, dim) = (AddressType::U32, CubeDim::new_1d($units(form)));
            let made = form!(
                $kernel,
                dim,
                [
                    bits,
                    COLUMNS,
                    query(),
                    rows(0),
                    rows(1),
                    _,
                    row_pages(),
                    _,
                    row_pages(),
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    _,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    pages(),
                    1.0,
                    1,
                    form,
                    elem
                ]
            );
            let name = format!("sparse_mla.{}.{}.{}", $of, form.tile.elem().name(), $name);
            Entry::new(name, made).on(|arch| arch == Arch::Sm100a).unchecked()
        }};
    }
    let of_one = |(name, form)| entry!(sparse_sm100_kernel, single::units, "sm100", name, form);
    let of_two = |(name, form)| {
        entry!(sparse_sm100_pair_kernel, pair::units, "sm100_pair", name, Form { pair: true, by_two: true, ..form })
    };
    let mut forms = Form::of_models();
    let v32 = forms[0].1;
    let v4 = forms.iter().find(|(name, _)| *name == "512.two").expect("a model has it").1;
    let fp8 = Form { rows: [Stored::V3; 2], ..v32 };
    forms.extend([
        ("576.fp8", fp8),
        ("576.fp8.split", Form { lengths: [true, false], writes: Writes::Split, ..fp8 }),
        ("576.fp8.pages", Form { pages: Some(Causal(true)), writes: Writes::Planned, ..fp8 }),
        ("512.fp8.two", Form { rows: [Stored::V4; 2], ..v4 }),
        ("512.fp8.entries", Form { rows: [Stored::Dense, Stored::V4], ..v4 }),
    ]);
    forms.iter().copied().map(of_one).chain(forms.iter().copied().map(of_two)).collect()
}
