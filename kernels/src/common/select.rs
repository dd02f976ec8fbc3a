//! Tables of an operation's implementations, in the order in which they are preferred.

use cubecl::prelude::*;

/// An implementation, by what it is written in. Not every operation has each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// Plain arithmetic, on every device.
    Plain,
    /// Matrix instructions of a warp, on NVIDIA's GPUs from sm_80 on.
    Mma,
    /// TMA and wgmma, on Hopper (sm_90a).
    Sm90,
    /// TMA and tcgen05, on Blackwell of data centers (sm_100a).
    Sm100,
}

impl Path {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Mma, Self::Sm90, Self::Sm100];
}

/// An implementation that a device has for a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Available {
    /// Which one.
    pub path: Path,
    /// What it needs of device and problem.
    pub needs: &'static str,
}

/// A row of an operation's table.
pub(crate) struct Variant<Sizes: 'static, Form: 'static> {
    pub path: Path,
    /// What it needs of device and problem, for a reader.
    pub needs: &'static str,
    /// How the kernel divides the work; none where the device or the kernel does not take the problem.
    pub form: fn(&Client, &Sizes) -> Option<Form>,
    /// Its kernels, for the offline check.
    #[cfg(feature = "offline")]
    pub offline: fn() -> Vec<crate::offline::Entry>,
}

/// An operation's implementations, the fastest first.
pub(crate) struct Table<Sizes: 'static, Form: 'static>(pub &'static [Variant<Sizes, Form>]);

impl<Sizes, Form> Table<Sizes, Form> {
    /// The first that takes the problem.
    pub fn choose(&self, client: &Client, sizes: &Sizes) -> Option<(Path, Form)> {
        self.0.iter().find_map(|variant| Some((variant.path, (variant.form)(client, sizes)?)))
    }

    /// The form of a certain one.
    pub fn form(&self, path: Path, client: &Client, sizes: &Sizes) -> Option<Form> {
        let variant = self.0.iter().find(|variant| variant.path == path)?;
        (variant.form)(client, sizes)
    }

    /// All that take the problem.
    pub fn available(&self, client: &Client, sizes: &Sizes) -> Vec<Available> {
        let has = |variant: &&Variant<Sizes, Form>| (variant.form)(client, sizes).is_some();
        self.0.iter().filter(has).map(|&Variant { path, needs, .. }| Available { path, needs }).collect()
    }

    /// The kernels of all.
    #[cfg(feature = "offline")]
    pub fn offline(&self) -> Vec<crate::offline::Entry> {
        self.0.iter().flat_map(|variant| (variant.offline)()).collect()
    }
}
