//! The forms whose machine code is looked at without a GPU.

use cubecl::ir::{AddressType, FloatKind};
use cubecl::prelude::*;

use super::{pair, rows_map, single, sparse_sm100_kernel, sparse_sm100_pair_kernel};
use crate::offline::{Arch, Entry, buffer, form};
use crate::sparse_mla::form::Form;
use crate::sparse_mla::launch::query_map;
use crate::sparse_mla::work::PagedKeysLaunch;
use crate::tiles::output::COLUMNS;

pub(in crate::sparse_mla) fn offline() -> Vec<Entry> {
    macro_rules! entry {
        ($kernel:ident, $units:expr, $of:literal, $name:expr, $form:expr) => {{
            let form: Form = $form;
            let elem = ElemType::Float(if form.tile.bf16 { FloatKind::BF16 } else { FloatKind::F16 });
            let query = move || query_map(buffer(), form.tile, 64, elem).expect("made of a handle");
            let rows = move || rows_map(buffer(), form.tile, 64, elem).expect("made of a handle");
            let pages = || PagedKeysLaunch::new(1, 1, 1, 1);
            let (bits, dim) = (AddressType::U32, CubeDim::new_1d($units));
            let made = form!(
                $kernel,
                dim,
                [
                    bits,
                    COLUMNS,
                    query(),
                    rows(),
                    rows(),
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
    let of_one = |(name, form)| entry!(sparse_sm100_kernel, single::UNITS, "sm100", name, form);
    let of_two =
        |(name, form)| entry!(sparse_sm100_pair_kernel, pair::UNITS, "sm100_pair", name, Form { pair: true, ..form });
    let models = Form::of_models();
    models.iter().copied().map(of_one).chain(models.iter().copied().map(of_two)).collect()
}
