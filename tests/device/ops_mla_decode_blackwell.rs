//! `mla_decode` with Blackwell's own kernels: one cube up to 64 query rows, a pair above. Skipped on other devices.
//!
//! 840 cases. With `MLA_GRID_LOG=file` it notes what is done, and a second run goes on where the first was stopped.

use std::collections::HashSet;
use std::fs::{OpenOptions, read_to_string};
use std::io::Write;

use burn::tensor::{DType, Device};
use mla_ops::{Path, Splits};

use crate::devices::{for_each_device, is_blackwell, skip};
use crate::ops_fixture::DecodeCase;

const HEADS: [usize; 5] = [1, 16, 64, 65, 128];
const LENS: [usize; 7] = [0, 1, 63, 64, 65, 200, 513];
const QUERY_LENS: [usize; 2] = [1, 2];
const SPLITS: [Splits; 4] = [Splits::Count(1), Splits::Count(2), Splits::Count(7), Splits::Auto];
const PAGE_SIZES: [usize; 3] = [16, 64, 128];

/// A value of each axis, by number.
type Point = [usize; 5];

const AXES: Point = [HEADS.len(), LENS.len(), QUERY_LENS.len(), SPLITS.len(), PAGE_SIZES.len()];

/// All points.
fn grid() -> Vec<Point> {
    let point = |mut number: usize| {
        AXES.map(|values| {
            let value = number % values;
            number /= values;
            value
        })
    };
    (0..AXES.iter().product()).map(point).collect()
}

/// A second sequence follows, so that the kernels go from item to item. Types, widths and masks alternate over the grid.
fn case(point: &Point) -> DecodeCase {
    let &[heads, len, query_len, splits, page_size] = point;
    let number: usize = point.iter().sum();
    let (splits, query_len) = (SPLITS[splits], QUERY_LENS[query_len]);
    DecodeCase {
        lens: vec![LENS[len], 70],
        query_len,
        heads: HEADS[heads],
        page_size: PAGE_SIZES[page_size],
        widths: if number.is_multiple_of(3) { (512, 512) } else { (576, 512) },
        // What is causal differs only with several query tokens.
        causal: query_len > 1 || number.is_multiple_of(2),
        splits,
        dtype: if number.is_multiple_of(2) { DType::BF16 } else { DType::F16 },
        path: Some(Path::Sm100),
        ..Default::default()
    }
}

fn on_blackwell(test: impl Fn(&Device)) {
    for_each_device(|device| match is_blackwell(device) {
        true => test(device),
        false => skip(device, "it is no Blackwell GPU"),
    });
}

#[test]
fn ops_decode_blackwell_grid() {
    on_blackwell(|device| {
        let log = std::env::var_os("MLA_GRID_LOG");
        let done = log.as_ref().map_or(String::new(), |log| read_to_string(log).unwrap_or_default());
        let done: HashSet<&str> = done.lines().collect();
        for point in grid() {
            let name = format!("{point:?}");
            if done.contains(name.as_str()) {
                continue;
            }
            case(&point).inputs(83).check(device);
            if let Some(log) = &log {
                let mut file = OpenOptions::new().create(true).append(true).open(log).expect("a file to write to");
                writeln!(file, "{name}").expect("room for a line");
            }
        }
    });
}
