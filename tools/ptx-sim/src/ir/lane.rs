//! Operations of single lanes beyond the common ones in 32-bit integers and f32.
use super::{Compare, Round, Ty};

/// What a result is clamped to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clamp {
    None,
    /// `.sat`: 0 to 1, and NaN is 0; of integers their type's limits.
    Unit,
    /// `.relu`: not below 0.
    Positive,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HalfKind {
    Add,
    Sub,
    Mul,
    Fma,
    Min,
    Max,
    Neg,
    Abs,
    Exp2,
    Tanh,
}

/// Arithmetic in f16 or bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HalfOp {
    pub kind: HalfKind,
    pub ty: Ty,
    /// Two in a register.
    pub packed: bool,
    pub ftz: bool,
    pub clamp: Clamp,
    /// `.NaN`: min and max of a NaN are one.
    pub nan: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DoubleKind {
    Add,
    Sub,
    Mul,
    Fma,
    Div,
    Sqrt,
    Recip,
    Rsqrt,
    /// The upper 32 bits of the result.
    RecipUpper,
    RsqrtUpper,
    Min,
    Max,
    Neg,
    Abs,
    CopySign,
}

/// `cvt` between numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Conversion {
    pub to: Ty,
    pub from: Ty,
    pub round: Round,
    /// Rounds to a whole number.
    pub integral: bool,
    pub clamp: Clamp,
    pub ftz: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fp8 {
    E4m3,
    E5m2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntOp {
    SadU,
    SadS,
    /// Whether a and b are signed.
    Dp4a((bool, bool)),
    Dp2a {
        signs: (bool, bool),
        high: bool,
    },
    Mul24 {
        signed: bool,
        high: bool,
    },
    Mad24 {
        signed: bool,
    },
    MadHiU,
    MadHiS,
    Bfind {
        bits: u32,
        signed: bool,
        shift: bool,
    },
    AddSat,
    SubSat,
    AddHalves,
    MinHalves {
        signed: bool,
    },
    MaxHalves {
        signed: bool,
    },
    SlctS,
    SlctF,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CarryKind {
    Add,
    Sub,
    MadLow,
    MadHigh,
}

/// Arithmetic with a carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Carry {
    pub kind: CarryKind,
    pub bits: u32,
    pub signed: bool,
    pub uses: bool,
    pub sets: bool,
}

/// `set`: a comparison whose result is a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Set {
    pub cmp: Compare,
    pub from: Ty,
    /// Two comparisons of halves.
    pub packed: bool,
    pub ftz: bool,
    /// Bits for true; of halves in each.
    pub yes: u64,
}

/// Classes of floats (PTX ISA, `testp`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Finite,
    Infinite,
    Number,
    NotANumber,
    Normal,
    Subnormal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RoundedKind {
    Add,
    Sub,
    Mul,
    Fma,
}

/// An operation on up to three values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaneOp {
    Half(HalfOp),
    Double(DoubleKind, Round),
    Int(IntOp),
    /// f32 with a rounding mode or `.sat`.
    Rounded {
        kind: RoundedKind,
        round: Round,
        ftz: bool,
        saturate: bool,
    },
    /// `min.NaN` and `max.NaN` of f32.
    ExtremeNan {
        max: bool,
        ftz: bool,
    },
    Set(Set),
    /// Two f32 to a pair, the upper first.
    Pair {
        to: Ty,
        round: Round,
        relu: bool,
    },
    Tf32 {
        away: bool,
    },
    /// Two numbers to a pair of FP8, the upper first.
    Fp8Pair {
        format: Fp8,
        relu: bool,
    },
    /// A pair of f16 or bf16 to one of FP8.
    Fp8FromPair {
        format: Fp8,
        relu: bool,
        from: Ty,
    },
    Fp8ToF16 {
        format: Fp8,
        relu: bool,
    },
}
