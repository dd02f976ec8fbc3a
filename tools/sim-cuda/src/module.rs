//! Modules and functions that the program has loaded, by the handles that it got.
use crate::code::Code;
use ptx_sim::Module;
use std::collections::HashMap;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// A loaded module.
#[derive(Debug)]
pub struct Loaded {
    /// The text.
    pub ptx: String,
    /// Tells modules apart, in names of files.
    pub hash: u64,
    /// What the text says.
    pub module: Module,
}

impl Loaded {
    /// Parses PTX.
    ///
    /// # Errors
    /// Where the text is none.
    pub fn new(ptx: String) -> Result<Self, ptx_sim::ParseError> {
        let mut hasher = DefaultHasher::new();
        ptx.hash(&mut hasher);
        let module = ptx_sim::parse(&ptx)?;
        Ok(Self { hash: hasher.finish(), module, ptx })
    }
}

/// A kernel of a loaded module.
#[derive(Debug, Clone)]
pub struct Function {
    /// Its module.
    pub module: Arc<Loaded>,
    /// Its index in the module.
    pub entry: usize,
    /// Dynamic shared memory that launches may have.
    pub dynamic_shared: u32,
}

impl Function {
    /// The kernel.
    pub fn entry(&self) -> &ptx_sim::Entry {
        &self.module.module.entries[self.entry]
    }

    /// Shared memory that the kernel declares.
    pub fn static_shared(&self) -> u64 {
        self.entry().shared.iter().chain(&self.module.module.shared).map(|v| v.bytes).sum()
    }

    /// Copies the arguments of a launch.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] without arguments that the kernel needs.
    ///
    /// # Safety
    /// `params` points to as many pointers as the kernel has parameters, each of them to as many bytes as the
    /// parameter has; that is what `cuLaunchKernel` asks of its caller.
    pub unsafe fn arguments(&self, params: *mut *mut c_void) -> Result<Vec<Vec<u8>>, Code> {
        let entry = self.entry();
        if params.is_null() && !entry.params.is_empty() {
            return Err(Code::InvalidValue);
        }
        let copy = |(index, parameter): (usize, &ptx_sim::Parameter)| {
            let mut bytes = vec![0; parameter.bytes as usize];
            // SAFETY: the caller vouches for the pointers and what they point to.
            unsafe { std::ptr::copy_nonoverlapping((*params.add(index)).cast(), bytes.as_mut_ptr(), bytes.len()) };
            bytes
        };
        Ok(entry.params.iter().enumerate().map(copy).collect())
    }
}

/// A launch as the program asked for it.
#[derive(Debug, Clone)]
pub struct Call {
    /// The kernel.
    pub function: Function,
    /// CTAs in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y, z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u32,
    /// The bytes of each parameter.
    pub params: Vec<Vec<u8>>,
}

impl Call {
    /// The parameters by words of 8 bytes; pointers are among them, also that of a tensor map.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b));
        self.params.iter().flat_map(move |bytes| bytes.chunks_exact(8).map(word))
    }
}

/// What has been loaded. Handles are the driver's.
#[derive(Debug, Default)]
pub struct Registry {
    modules: HashMap<usize, Arc<Loaded>>,
    functions: HashMap<usize, Function>,
}

impl Registry {
    /// Adds a module.
    pub fn add_module(&mut self, handle: usize, module: Loaded) {
        self.modules.insert(handle, Arc::new(module));
    }

    /// Removes a module; its functions stay, as launches may still be under way.
    ///
    /// # Errors
    /// [`Code::InvalidHandle`].
    pub fn remove_module(&mut self, handle: usize) -> Result<(), Code> {
        self.modules.remove(&handle).map(|_| ()).ok_or(Code::InvalidHandle)
    }

    /// Adds a function of a module.
    ///
    /// # Errors
    /// [`Code::InvalidHandle`] of the module, [`Code::NotFound`] of the name.
    pub fn add_function(&mut self, handle: usize, module: usize, name: &str) -> Result<(), Code> {
        let module = self.modules.get(&module).ok_or(Code::InvalidHandle)?;
        let entry = module.module.entries.iter().position(|e| e.name == name).ok_or(Code::NotFound)?;
        let mut function = Function { module: module.clone(), entry, dynamic_shared: 0 };
        function.dynamic_shared = crate::device::SHARED.saturating_sub(function.static_shared() as u32);
        self.functions.insert(handle, function);
        Ok(())
    }

    /// A function.
    ///
    /// # Errors
    /// [`Code::InvalidHandle`].
    pub fn function(&mut self, handle: usize) -> Result<&mut Function, Code> {
        self.functions.get_mut(&handle).ok_or(Code::InvalidHandle)
    }
}
