//! Matrix instructions of warps (PTX ISA 9.7.14).
use super::Decoder;
use crate::error::Fault;
use crate::ir::{Elem, Layout, MatrixOp, Op, Product, Rows, Shape, Slot, Space, WmmaAccess};

pub(super) fn elem(name: &str) -> Option<Elem> {
    Some(match name {
        "f16" => Elem::F16,
        "bf16" => Elem::Bf16,
        "tf32" => Elem::Tf32,
        "e4m3" => Elem::E4m3,
        "e5m2" => Elem::E5m2,
        "s8" => Elem::S8,
        "u8" => Elem::U8,
        "f32" => Elem::F32,
        "s32" => Elem::S32,
        _ => return None,
    })
}

/// `m16n8k16`.
pub(super) fn shape(name: &str) -> Option<Shape> {
    let (m, rest) = name.strip_prefix('m')?.split_once('n')?;
    let (n, k) = rest.split_once('k')?;
    Some(Shape { m: m.parse().ok()?, n: n.parse().ok()?, k: k.parse().ok()? })
}

/// Whether factors of these types make sums of this one.
pub(super) fn types_fit(a: Elem, b: Elem, sum: Elem) -> bool {
    match a {
        Elem::F16 => b == a && matches!(sum, Elem::F16 | Elem::F32),
        Elem::Bf16 | Elem::Tf32 => b == a && sum == Elem::F32,
        Elem::E4m3 | Elem::E5m2 => matches!(b, Elem::E4m3 | Elem::E5m2) && matches!(sum, Elem::F16 | Elem::F32),
        Elem::S8 | Elem::U8 => matches!(b, Elem::S8 | Elem::U8) && sum == Elem::S32,
        Elem::F32 | Elem::S32 => false,
    }
}

/// Shapes of `mma.sync` whose fragments follow one rule: 16 by 8, a row of A in 16 or 32 bytes.
fn mma_shape(shape: Shape, elem: Elem) -> bool {
    (shape.m, shape.n) == (16, 8) && matches!(shape.k * elem.bits(), 128 | 256)
}

fn wmma_shape(shape: Shape, elem: Elem) -> bool {
    match elem {
        Elem::Tf32 => (shape.m, shape.n, shape.k) == (16, 16, 8),
        _ => shape.k == 16 && matches!((shape.m, shape.n), (16, 16) | (8, 32) | (32, 8)),
    }
}

fn order(name: &str) -> Option<bool> {
    match name {
        "row" => Some(true),
        "col" => Some(false),
        _ => None,
    }
}

impl Decoder<'_, '_> {
    pub(super) fn matrix(&mut self, parts: &[&str]) -> Result<Option<Op>, Fault> {
        let op = match parts {
            ["mma", "sync", "aligned", s, "row", "col", rest @ .., d, a, b, c] => self.mma(s, rest, [d, a, b, c])?,
            ["wmma", "mma", "sync", "aligned", a, b, s, rest @ ..] if order(a).is_some() && order(b).is_some() => {
                self.wmma_product(s, rest)?
            }
            ["wmma", "load", which, "sync", "aligned", rest @ ..] => self.wmma_load(which, rest)?,
            ["wmma", "store", "d", "sync", "aligned", rest @ ..] => self.wmma_store(rest)?,
            ["ldmatrix", "sync", "aligned", "m8n8", count, rest @ ..] => self.rows(count, rest, true)?,
            ["stmatrix", "sync", "aligned", "m8n8", count, rest @ ..] => self.rows(count, rest, false)?,
            _ => None,
        };
        Ok(op.map(|op| Op::Matrix(Box::new(op))))
    }

    fn mma(&mut self, s: &str, rest: &[&str], types: [&str; 4]) -> Result<Option<MatrixOp>, Fault> {
        let saturate = match rest {
            [] | ["kind::f8f6f4"] => false,
            ["satfinite"] => true,
            _ => return Ok(None),
        };
        let (Some(shape), [Some(d), Some(a), Some(b), Some(c)]) = (shape(s), types.map(elem)) else { return Ok(None) };
        if !mma_shape(shape, a) || !types_fit(a, b, c) || !types_fit(a, b, d) || saturate && !a.is_int() {
            return Ok(None);
        }
        self.product(Layout::Mma, shape, [d, a, b, c], saturate)
    }

    /// In f16 only the types of D and C are written (PTX ISA, `wmma.mma`).
    fn wmma_product(&mut self, s: &str, rest: &[&str]) -> Result<Option<MatrixOp>, Fault> {
        let (rest, saturate) = match rest {
            [rest @ .., "satfinite"] => (rest, true),
            rest => (rest, false),
        };
        let types = match rest {
            [d, c] => [*d, "f16", "f16", *c],
            [d, a, b, c] => [*d, *a, *b, *c],
            _ => return Ok(None),
        };
        let (Some(shape), [Some(d), Some(a), Some(b), Some(c)]) = (shape(s), types.map(elem)) else { return Ok(None) };
        let fits = wmma_shape(shape, a) && types_fit(a, b, c) && types_fit(a, b, d) && a == b;
        if !fits || saturate && !a.is_int() || matches!(a, Elem::E4m3 | Elem::E5m2) {
            return Ok(None);
        }
        self.product(Layout::Wmma, shape, [d, a, b, c], saturate)
    }

    fn product(
        &mut self,
        layout: Layout,
        shape: Shape,
        [d_elem, a_elem, b_elem, c_elem]: [Elem; 4],
        saturate: bool,
    ) -> Result<Option<MatrixOp>, Fault> {
        let Shape { m, n, k } = shape;
        let count = |rows: usize, columns: usize, elem: Elem, factor: bool| match (layout, elem) {
            (Layout::Wmma, Elem::F16) if factor => 8,
            _ => rows * columns / (32 * elem.packed()),
        };
        let (d, a) = (self.dests()?, self.sources(32)?);
        let (b, c) = (self.sources(32)?, self.sources(32)?);
        self.check_parts(&d, count(m, n, d_elem, false))?;
        self.check_parts(&a, count(m, k, a_elem, true))?;
        self.check_parts(&b, count(k, n, b_elem, true))?;
        self.check_parts(&c, count(m, n, c_elem, false))?;
        Ok(Some(MatrixOp::Product(Product { layout, shape, a_elem, b_elem, c_elem, d_elem, saturate, d, a, b, c })))
    }

    fn wmma_load(&mut self, which: &str, rest: &[&str]) -> Result<Option<MatrixOp>, Fault> {
        let Some((row_major, shape, space, elem)) = wmma_access(rest) else { return Ok(None) };
        let (rows, columns) = match which {
            "a" => (shape.m, shape.k),
            "b" => (shape.k, shape.n),
            "c" => (shape.m, shape.n),
            _ => return Ok(None),
        };
        let (registers, addr) = (self.dests()?, self.address()?);
        let stride = if self.remaining() > 0 { Some(self.source(32)?) } else { None };
        let doubled = elem == Elem::F16 && which != "c";
        self.check_parts(&registers, if doubled { 8 } else { rows * columns / (32 * elem.packed()) })?;
        Ok(Some(MatrixOp::WmmaLoad(WmmaAccess { space, elem, rows, columns, row_major, registers, addr, stride })))
    }

    fn wmma_store(&mut self, rest: &[&str]) -> Result<Option<MatrixOp>, Fault> {
        let Some((row_major, shape, space, elem)) = wmma_access(rest) else { return Ok(None) };
        let (rows, columns) = (shape.m, shape.n);
        let (addr, registers) = (self.address()?, self.sources(32)?);
        let stride = if self.remaining() > 0 { Some(self.source(32)?) } else { None };
        self.check_parts(&registers, rows * columns / (32 * elem.packed()))?;
        Ok(Some(MatrixOp::WmmaStore(WmmaAccess { space, elem, rows, columns, row_major, registers, addr, stride })))
    }

    fn rows(&mut self, count: &str, rest: &[&str], load: bool) -> Result<Option<MatrixOp>, Fault> {
        let transposed = match rest {
            ["shared" | "shared::cta", "b16"] | ["b16"] => false,
            ["trans", "shared" | "shared::cta", "b16"] | ["trans", "b16"] => true,
            _ => return Ok(None),
        };
        let count = match count {
            "x1" => 1,
            "x2" => 2,
            "x4" => 4,
            _ => return Ok(None),
        };
        let (registers, addr): (Box<[Slot]>, _) = if load {
            (self.dests()?, self.address()?)
        } else {
            let addr = self.address()?;
            (self.sources(32)?, addr)
        };
        self.check_parts(&registers, count)?;
        let rows = Rows { transposed, registers, addr };
        Ok(Some(if load { MatrixOp::Load(rows) } else { MatrixOp::Store(rows) }))
    }
}

/// Order, shape, space and type of a `wmma` access.
fn wmma_access(parts: &[&str]) -> Option<(bool, Shape, Space, Elem)> {
    let (order_name, shape_name, space, elem_name) = match parts {
        [o, s, t] => (o, s, Space::Generic, t),
        [o, s, "global", t] => (o, s, Space::Global, t),
        [o, s, "shared" | "shared::cta", t] => (o, s, Space::Shared, t),
        _ => return None,
    };
    let (shape, elem) = (shape(shape_name)?, elem(elem_name)?);
    let tf32 = matches!(elem, Elem::Tf32 | Elem::F32) && (shape.m, shape.n, shape.k) == (16, 16, 8);
    (tf32 || wmma_shape(shape, elem)).then_some((order(order_name)?, shape, space, elem))
}
