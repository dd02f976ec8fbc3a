//! [`Weight`] and [`StackedWeight`] as Burn modules: a dense weight is one parameter, under the name of its field; blocks are two,
//! `codes` and `scales` below it.

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param, ParamId,
    ParameterValue,
};
use burn::tensor::Device;

use super::{Format, StackedWeight, Weight};

/// A parameter of a weight, without gradients: the operations have no backward pass.
pub(super) fn param<T: ParameterValue>(tensor: T) -> Param<T> {
    Param::initialized(ParamId::new(), tensor)
}

/// One of a weight that lives as long as a call. No record names it: its id need not be drawn.
#[cfg(feature = "flex")]
pub(super) fn param_of_call<T: ParameterValue>(tensor: T) -> Param<T> {
    Param::initialized(ParamId::from(0), tensor)
}

/// A weight whose part has become another one.
macro_rules! with_part {
    ($weight:expr, $part:ident => $new:expr) => {
        Self(match $weight {
            Format::Dense($part) => Format::Dense($new),
            Format::Blocks($part) => Format::Blocks($new),
        })
    };
}

/// The same for both, which differ in rank alone.
macro_rules! module {
    ($name:ident) => {
        impl Module for $name {
            fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
                match &self.0 {
                    Format::Dense(part) => part.visit(visitor),
                    Format::Blocks(part) => part.visit(visitor),
                }
            }

            fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
                with_part!(self.0, part => Module::map(part, mapper))
            }

            fn collect_devices(&self, devices: Devices) -> Devices {
                match &self.0 {
                    Format::Dense(part) => part.collect_devices(devices),
                    Format::Blocks(part) => part.collect_devices(devices),
                }
            }

            fn to_device(self, device: &Device) -> Self {
                with_part!(self.0, part => part.to_device(device))
            }

            fn fork(self, device: &Device) -> Self {
                with_part!(self.0, part => part.fork(device))
            }

            fn train(self) -> Self {
                with_part!(self.0, part => part.train())
            }

            fn valid(&self) -> Self {
                with_part!(&self.0, part => part.valid())
            }

            fn materialize(self) -> Self {
                with_part!(self.0, part => part.materialize())
            }
        }

        impl ModuleDisplayDefault for $name {
            fn content(&self, content: Content) -> Option<Content> {
                let text = format!("{} {{shape: {:?}, {:?}}}", stringify!($name), self.dims(), self.format());
                content.add_formatted(&text).optional()
            }
        }

        impl ModuleDisplay for $name {}
    };
}

module!(Weight);
module!(StackedWeight);
