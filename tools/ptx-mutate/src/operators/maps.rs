//! Tensor maps: what a launch passes is changed, not the PTX (CUDA driver API, `cuTensorMapEncodeTiled`).
use ptx_sim::{TensorElem, TensorMap, TensorSwizzle};

const SWIZZLES: [(TensorSwizzle, &str); 4] = [
    (TensorSwizzle::None, "none"),
    (TensorSwizzle::Bytes32, "32"),
    (TensorSwizzle::Bytes64, "64"),
    (TensorSwizzle::Bytes128, "128"),
];

/// One field of a tensor map, changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapField {
    /// The tensor begins 16 bytes later.
    Address,
    /// A dimension of the tensor is one longer or shorter.
    Bounds(usize, bool),
    /// 16 bytes more from one element of a dimension to the next.
    Stride(usize),
    /// Twice or half as many elements of a dimension in a box.
    Box(usize, bool),
    /// Every second element of a dimension.
    Step(usize),
    /// Elements of twice or half the size.
    Elem(bool),
    /// How boxes lie in shared memory.
    Swizzle(TensorSwizzle),
    /// What lies outside is NaN instead of zero.
    Fill,
}

impl MapField {
    /// All changes of a map that the driver would take.
    pub(crate) fn all(map: &TensorMap) -> Vec<Self> {
        let mut fields = vec![Self::Address];
        fields.extend((0..map.dims.len()).flat_map(|i| [false, true].map(|more| Self::Bounds(i, more))));
        fields.extend((0..map.strides.len()).map(Self::Stride));
        fields.extend((0..map.boxes.len()).flat_map(|i| [false, true].map(|more| Self::Box(i, more))));
        fields.extend((1..map.steps.len()).map(Self::Step));
        fields.extend([false, true].map(Self::Elem));
        fields.extend(SWIZZLES.map(|(swizzle, _)| Self::Swizzle(swizzle)));
        fields.push(Self::Fill);
        fields.retain(|field| field.change(map).is_some());
        fields
    }

    /// The changed map; none where nothing changes, or the driver would refuse it.
    pub fn change(self, map: &TensorMap) -> Option<TensorMap> {
        let mut new = map.clone();
        match self {
            Self::Address => new.address += 16,
            Self::Bounds(i, more) => resize(new.dims.get_mut(i)?, more, |n| n + 1, |n| n - 1),
            Self::Stride(i) => *new.strides.get_mut(i)? += 16,
            Self::Box(i, more) => resize(new.boxes.get_mut(i)?, more, |n| 2 * n, |n| n / 2),
            Self::Step(i) => *new.steps.get_mut(i)? = 2,
            Self::Elem(more) => {
                let (TensorElem::Int(bytes) | TensorElem::Float(bytes)) = &mut new.elem;
                resize(bytes, more, |n| 2 * n, |n| n / 2);
                // There are no floats of one byte.
                if *bytes == 1 {
                    new.elem = TensorElem::Int(1);
                }
            }
            Self::Swizzle(swizzle) => new.swizzle = swizzle,
            Self::Fill => new.fill_nan = true,
        }
        let known = (1..=8).contains(&new.elem.bytes());
        (new != *map && known && new.encode().is_ok()).then_some(new)
    }

    /// `swizzle 128->none`; what differs between the launches of a kernel is not named.
    pub(crate) fn describe(self, map: &TensorMap) -> String {
        let swizzle = |of: TensorSwizzle| SWIZZLES.iter().find(|(s, _)| *s == of).map_or("", |(_, name)| name);
        match self {
            Self::Address => "address +16".to_string(),
            Self::Bounds(i, more) => format!("bounds {i} {}1", if more { '+' } else { '-' }),
            Self::Stride(i) => format!("stride {i} +16"),
            Self::Box(i, more) => format!("box {i} {}", if more { "doubled" } else { "halved" }),
            Self::Step(i) => format!("step {i} to 2"),
            Self::Elem(more) => format!("element {}", if more { "doubled" } else { "halved" }),
            Self::Swizzle(new) => format!("swizzle {}->{}", swizzle(map.swizzle), swizzle(new)),
            Self::Fill => "fill zero->nan".to_string(),
        }
    }
}

fn resize<T: Copy>(value: &mut T, more: bool, up: impl Fn(T) -> T, down: impl Fn(T) -> T) {
    *value = if more { up(*value) } else { down(*value) };
}
