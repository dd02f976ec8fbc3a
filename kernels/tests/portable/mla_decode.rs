//! The decode kernel against f64 loops over the keys that a row may see.

use cubecl::features::TypeUsage;
use cubecl::prelude::*;
use half::{bf16, f16};
use mla_kernels::Path;
use mla_kernels::cache_rows::{CacheArg, RowFormat};
use mla_kernels::mla_decode::{self, DecodeArgs, DecodeError, DecodeSizes};
use mla_kernels::mla_plan::SplitMode;

use super::mla_plan::{Plan, expected as plan};
use super::support::{arg, for_each_client, random, read, upload};

/// Keys in a tile of the plan.
const TILE: usize = 64;

/// What page table entries past a sequence's end hold.
const NO_PAGE: i32 = 2_147_480_000;

/// A batch to decode.
#[derive(Debug, Clone)]
struct Case {
    lens: Vec<usize>,
    query_len: usize,
    heads: usize,
    /// Of key and value.
    widths: (usize, usize),
    page_size: usize,
    causal: bool,
    cubes: usize,
    mode: SplitMode,
    /// A sequence whose keys are NaN.
    ruined: Option<usize>,
}

/// All lengths around the edges of pages and tiles.
fn base_case() -> Case {
    Case {
        lens: vec![0, 1, 63, 64, 65, 200],
        query_len: 1,
        heads: 3,
        widths: (80, 64),
        page_size: 16,
        causal: true,
        cubes: 7,
        mode: SplitMode::Auto,
        ruined: None,
    }
}

/// An element type of queries and cache.
trait Element: CubeElement + CubePrimitive + Copy {
    /// Relative error of a rounded number.
    const ROUNDING: f64;
    fn round(x: f32) -> Self;
    fn value(self) -> f64;
}

macro_rules! element {
    ($($ty:ty, $bits:expr, $round:expr, $value:expr;)*) => {$(
        impl Element for $ty {
            const ROUNDING: f64 = 1.0 / (1u32 << $bits) as f64;
            fn round(x: f32) -> Self {
                $round(x)
            }
            fn value(self) -> f64 {
                $value(self)
            }
        }
    )*};
}

element! {
    f32, 24, |x| x, f64::from;
    f16, 11, f16::from_f32, f16::to_f64;
    bf16, 8, bf16::from_f32, bf16::to_f64;
}

/// What the tensors hold.
struct Inputs<T> {
    q: Vec<T>,
    kv_cache: Vec<T>,
    page_table: Vec<i32>,
    pages: usize,
    max_pages: usize,
    scale: f32,
}

impl Case {
    fn rows(&self) -> usize {
        self.query_len * self.heads
    }

    /// Random values; NaN in whatever must not be read.
    fn inputs<T: Element>(&self) -> Inputs<T> {
        let width = self.widths.0;
        let max_pages = self.lens.iter().max().unwrap().div_ceil(self.page_size) + 2;
        let used: usize = self.lens.iter().map(|len| len.div_ceil(self.page_size)).sum();
        let pages = used + 3;
        let mut free: Vec<usize> = (0..pages).collect();
        let order = random(3, pages);
        free.sort_by(|&a, &b| order[a].total_cmp(&order[b]));

        let mut kv_cache = vec![T::round(f32::NAN); pages * self.page_size * width];
        let mut page_table = vec![NO_PAGE; self.lens.len() * max_pages];
        for (b, &len) in self.lens.iter().enumerate() {
            let keys = random(100 + b as u32, len * width);
            for token in 0..len {
                let entry = &mut page_table[b * max_pages + token / self.page_size];
                if *entry == NO_PAGE {
                    *entry = free.pop().unwrap() as i32;
                }
                let slot = *entry as usize * self.page_size + token % self.page_size;
                for (to, &from) in kv_cache[slot * width..][..width].iter_mut().zip(&keys[token * width..]) {
                    *to = T::round(if self.ruined == Some(b) { f32::NAN } else { from });
                }
            }
        }
        let q = random(7, self.lens.len() * self.rows() * width).into_iter().map(T::round).collect();
        Inputs { q, kv_cache, page_table, pages, max_pages, scale: 3.0 / (width as f32).sqrt() }
    }

    /// How many keys a row sees.
    fn visible(&self, b: usize, row: usize) -> usize {
        let len = self.lens[b];
        match self.causal {
            true => (len + row / self.heads + 1).saturating_sub(self.query_len).min(len),
            false => len,
        }
    }

    /// Output and lse of a row.
    fn expected<T: Element>(&self, inputs: &Inputs<T>, b: usize, row: usize) -> (Vec<f64>, f64) {
        let (width, value_width) = self.widths;
        let q = &inputs.q[(b * self.rows() + row) * width..][..width];
        let key = |j: usize| {
            let page = inputs.page_table[b * inputs.max_pages + j / self.page_size] as usize;
            &inputs.kv_cache[(page * self.page_size + j % self.page_size) * width..][..width]
        };
        let dot = |k: &[T]| k.iter().zip(q).map(|(k, q)| k.value() * q.value()).sum::<f64>();
        let scores: Vec<f64> = (0..self.visible(b, row)).map(|j| dot(key(j)) * f64::from(inputs.scale)).collect();
        let sum: f64 = scores.iter().map(|s| s.exp()).sum();
        let mut out = vec![0.0; value_width];
        for (j, s) in scores.iter().enumerate() {
            for (out, value) in out.iter_mut().zip(key(j)) {
                *out += s.exp() / sum * value.value();
            }
        }
        (out, sum.ln())
    }

    /// Decodes on the device. Returns out and lse; the scratch past the items is checked.
    fn decode<T: Element>(&self, client: &Client, inputs: &Inputs<T>, plan: &Plan, kernel: Path) -> (Vec<T>, Vec<f32>) {
        let batch = self.lens.len();
        let lens: Vec<i32> = self.lens.iter().map(|&len| len as i32).collect();
        // Two unused rows at the end, as plans have them.
        let mut items = plan.items.as_flattened().to_vec();
        items.extend([-1; 8]);
        let capacity = items.len() / 4;
        let (outs, lses) = (capacity * self.rows() * self.widths.1, capacity * self.rows());
        let (partial_out, partial_lse) = (upload(client, &vec![f32::NAN; outs]), upload(client, &vec![f32::NAN; lses]));
        let results = batch * self.rows();
        let out = upload(client, &vec![T::round(f32::NAN); results * self.widths.1]);
        let lse = upload(client, &vec![f32::NAN; results]);
        let args = DecodeArgs {
            q: arg(&upload(client, &inputs.q), inputs.q.len()),
            q_stride: self.widths.0,
            kv_cache: CacheArg::Dense(arg(&upload(client, &inputs.kv_cache), inputs.kv_cache.len())),
            kv_stride: self.widths.0,
            page_table: arg(&upload(client, &inputs.page_table), inputs.page_table.len()),
            seq_lens: arg(&upload(client, &lens), batch),
            items: arg(&upload(client, &items), items.len()),
            cube_ptr: arg(&upload(client, &plan.cube_ptr), plan.cube_ptr.len()),
            split_ptr: arg(&upload(client, &plan.split_ptr), plan.split_ptr.len()),
            partial_out: arg(&partial_out, outs),
            partial_lse: arg(&partial_lse, lses),
            out: arg(&out, results * self.widths.1),
            lse: arg(&lse, results),
            sizes: self.sizes::<T>(inputs.pages, inputs.max_pages, capacity),
            softmax_scale: inputs.scale,
        };
        mla_decode::launch_kernel(client, args, kernel).expect("launches");
        let partial_lses: Vec<f32> = read(client, partial_lse);
        let past = &partial_lses[plan.items.len() * self.rows()..];
        assert!(past.iter().all(|lse| lse.is_nan()), "wrote past the items: {self:?}");
        (read(client, out), read(client, lse))
    }

    /// Decodes and compares.
    fn check<T: Element>(&self, client: &Client) {
        for it in mla_decode::available(client, &self.sizes::<T>(1, 1, 1)) {
            self.check_kernel::<T>(client, it.path);
        }
    }

    fn sizes<T: Element>(&self, pages: usize, max_pages: usize, capacity: usize) -> DecodeSizes {
        DecodeSizes {
            batch: self.lens.len(),
            query_len: self.query_len,
            heads: self.heads,
            key_width: self.widths.0,
            value_width: self.widths.1,
            pages,
            page_size: self.page_size,
            max_pages,
            cubes: self.cubes,
            capacity,
            causal: self.causal,
            elem: T::cube_type(),
            rows: RowFormat::Dense,
        }
    }

    fn check_kernel<T: Element>(&self, client: &Client, kernel: Path) {
        // Values are within -1 .. 1. The matrix units take rounded weights, which may err by so much in all; the result is
        // rounded once more.
        let tolerance = 2e-5 + T::ROUNDING * if kernel == Path::Plain { 1.0 } else { 2.0 };
        let inputs = self.inputs::<T>();
        let lens: Vec<i32> = self.lens.iter().map(|&len| len as i32).collect();
        let plan = plan(&lens, 1000, TILE, self.cubes, self.mode);
        let (out, lse) = self.decode(client, &inputs, &plan, kernel);
        let (rows, width) = (self.rows(), self.widths.1);
        for b in (0..self.lens.len()).filter(|&b| self.ruined != Some(b)) {
            for row in 0..rows {
                let what = || format!("{kernel:?}, sequence {b}, row {row} of {self:?}");
                let (out, lse) = (&out[(b * rows + row) * width..][..width], lse[b * rows + row]);
                if self.visible(b, row) == 0 {
                    assert!(lse == f32::NEG_INFINITY, "lse {lse} of a row without keys: {}", what());
                    assert!(out.iter().all(|x| x.value() == 0.0), "output of a row without keys: {}", what());
                    continue;
                }
                let (expected_out, expected_lse) = self.expected(&inputs, b, row);
                let difference = (f64::from(lse) - expected_lse).abs();
                assert!(difference < 2e-5, "lse {lse} instead of {expected_lse}: {}", what());
                for (channel, (x, expected)) in out.iter().zip(expected_out).enumerate() {
                    let difference = (x.value() - expected).abs();
                    assert!(difference < tolerance, "{} instead of {expected} in {channel}: {}", x.value(), what());
                }
            }
        }
    }

    /// With the kernels for 16-bit elements alone, where there are any.
    fn check_16_bit<T: Element>(&self, client: &Client) {
        for it in mla_decode::available(client, &self.sizes::<T>(1, 1, 1)) {
            if it.path != Path::Plain {
                self.check_kernel::<T>(client, it.path);
            }
        }
    }

    fn check_all_types(&self, client: &Client) {
        self.check::<f32>(client);
        self.check::<f16>(client);
        if bf16::supported_uses(client).contains(TypeUsage::Buffer) {
            self.check::<bf16>(client);
        }
    }
}

#[test]
fn mla_decode_with_any_heads_and_queries() {
    for_each_client(|client| {
        for heads in [1, 3, 16, 63] {
            for query_len in [1, 2] {
                for causal in [false, true] {
                    Case { heads, query_len, causal, ..base_case() }.check_all_types(client);
                }
            }
        }
    });
}

/// More query tokens than keys, in the sequence or in its last split: the first ones see none.
#[test]
fn mla_decode_of_queries_without_keys() {
    for_each_client(|client| {
        let case = Case { lens: vec![2, 0, 5, 40, 33, 35], query_len: 5, heads: 2, ..base_case() };
        case.check_all_types(client);
        Case { mode: SplitMode::Tokens(1), ..case }.check_all_types(client);
    });
}

#[test]
fn mla_decode_with_any_widths() {
    for_each_client(|client| {
        for widths in [(576, 512), (80, 64), (7, 5), (64, 64), (20, 4), (300, 1), (1, 1)] {
            Case { widths, ..base_case() }.check_all_types(client);
        }
        Case { widths: (576, 512), heads: 16, query_len: 2, ..base_case() }.check_all_types(client);
    });
}

#[test]
fn mla_decode_with_any_page_size() {
    for_each_client(|client| {
        for page_size in [1, 2, 16, 64, 1024] {
            for causal in [false, true] {
                Case { page_size, causal, query_len: 2, ..base_case() }.check_all_types(client);
            }
        }
    });
}

#[test]
fn mla_decode_with_any_plan() {
    for_each_client(|client| {
        let modes =
            [SplitMode::Auto, SplitMode::Count(1), SplitMode::Count(5), SplitMode::Tokens(1), SplitMode::Tokens(100)];
        for cubes in [1, 3, 7, 100] {
            for mode in modes {
                Case { cubes, mode, ..base_case() }.check_all_types(client);
            }
        }
    });
}

/// NaN in one sequence stays there, also where a cube computes several sequences one after the other.
#[test]
fn mla_decode_keeps_sequences_apart() {
    for_each_client(|client| {
        let lens = vec![70, 3, 0, 20];
        for ruined in [0, 1] {
            Case { lens: lens.clone(), cubes: 1, ruined: Some(ruined), ..base_case() }.check_all_types(client);
        }
    });
}

/// Wide keys leave room for a single row of queries, and then for none.
#[test]
fn mla_decode_with_wide_keys() {
    for_each_client(|client| {
        Case { widths: (2000, 1001), lens: vec![37], ..base_case() }.check_all_types(client);
        Case { widths: (3600, 3600), lens: vec![37], ..base_case() }.check_all_types(client);
    });
}

/// The sizes of DeepSeek's models, which have kernels of their own on some devices.
#[test]
fn mla_decode_of_latents() {
    for_each_client(|client| {
        for (widths, heads, query_len, page_size) in [
            ((576, 512), 1, 1, 64),
            ((576, 512), 16, 1, 16),
            ((576, 512), 65, 1, 32),
            ((576, 512), 128, 1, 256),
            ((576, 512), 33, 3, 16),
            ((512, 512), 16, 2, 64),
            ((512, 512), 64, 1, 16),
            ((512, 512), 63, 1, 128),
        ] {
            let lens = vec![0, 1, 31, 33, 64, 130];
            let case = Case { lens, query_len, heads, widths, page_size, cubes: 5, ..base_case() };
            case.check_16_bit::<bf16>(client);
            case.check_16_bit::<f16>(client);
        }
    });
}

#[test]
fn mla_decode_refuses_what_the_device_lacks() {
    for_each_client(|client| {
        let buffer = upload(client, &[0i32; 64]);
        let args = |key_width, page_size, elem| DecodeArgs {
            q: arg(&buffer, 1),
            q_stride: key_width,
            kv_cache: CacheArg::Dense(arg(&buffer, 1)),
            kv_stride: key_width,
            page_table: arg(&buffer, 1),
            seq_lens: arg(&buffer, 1),
            items: arg(&buffer, 4),
            cube_ptr: arg(&buffer, 2),
            split_ptr: arg(&buffer, 2),
            partial_out: arg(&buffer, 1),
            partial_lse: arg(&buffer, 1),
            out: arg(&buffer, 1),
            lse: arg(&buffer, 1),
            sizes: DecodeSizes {
                batch: 1,
                query_len: 1,
                heads: 1,
                key_width,
                value_width: 1,
                pages: 1,
                page_size,
                max_pages: 1,
                cubes: 1,
                capacity: 1,
                causal: false,
                elem,
                rows: RowFormat::Dense,
            },
            softmax_scale: 1.0,
        };
        let error = |args| mla_decode::launch(client, args).expect_err("refused");
        let wide = error(args(5000, 1, f32::cube_type()));
        assert!(matches!(wide, DecodeError::SharedMemory { key_width: 5000, .. }), "{wide}");
        let page = error(args(1, 3, f32::cube_type()));
        assert!(matches!(page, DecodeError::Size { name: "page_size", actual: 3, .. }), "{page}");
        let int = error(args(1, 1, i32::cube_type()));
        assert_eq!(int, DecodeError::Element(i32::cube_type()));
    });
}
