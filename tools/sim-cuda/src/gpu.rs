//! The simulated GPU: memory, modules, launches. What goes wrong in a launch stays wrong, as on hardware.
use crate::code::Code;
use crate::config::Config;
use crate::device::{Limits, MEMORY};
use crate::module::{Call, Loaded, Registry};
use crate::record::Recorder;
use crate::report;
use ptx_sim::{Fault, Launch, Memory, Param, SimError};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::time::Instant;

/// What fresh memory holds: NaN in every float type of ours, and as an index out of bounds.
const FRESH: u8 = 0xff;

/// The simulated GPU.
pub struct Gpu {
    /// Its settings.
    pub config: Config,
    /// Its memory.
    pub memory: Memory,
    /// What it has loaded.
    pub registry: Registry,
    /// Events by handle, with the time they were recorded.
    pub events: HashMap<usize, Option<Instant>>,
    recorder: Option<Recorder>,
    /// Pinned memory of the host by address.
    host: HashMap<usize, Layout>,
    allocated: u64,
    handles: usize,
    failed: Option<Code>,
    reported: HashSet<String>,
}

impl Gpu {
    /// A GPU on which nothing has happened.
    pub fn new(config: Config) -> Self {
        let device = format!("ptx-sim sm_{}", config.arch);
        Self {
            recorder: config.trace.clone().map(|trace| Recorder::new(trace, device)),
            config,
            memory: Memory::new(),
            registry: Registry::default(),
            events: HashMap::new(),
            host: HashMap::new(),
            allocated: 0,
            handles: 0,
            failed: None,
            reported: HashSet::new(),
        }
    }

    /// A handle that is not yet in use.
    pub fn handle(&mut self) -> usize {
        self.handles += 1;
        self.handles << 4
    }

    /// The error that a launch left behind.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), Code> {
        self.failed.map_or(Ok(()), Err)
    }

    /// Allocates memory.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] for no bytes, or for more than the device has.
    pub fn alloc(&mut self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 || self.allocated + bytes as u64 > MEMORY {
            return Err(Code::InvalidValue);
        }
        let buffer = self.memory.alloc(&vec![FRESH; bytes]);
        self.allocated += bytes as u64;
        Ok(self.memory.address(buffer))
    }

    /// Frees memory.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] unless the address is one that [`alloc`](Self::alloc) gave.
    pub fn free(&mut self, address: u64) -> Result<(), Code> {
        match self.memory.around(address) {
            Some((buffer, bytes)) if self.memory.address(buffer) == address => {
                self.allocated -= bytes;
                self.memory.free(buffer);
                Ok(())
            }
            _ => Err(Code::InvalidValue),
        }
    }

    /// Allocates pinned memory of the host.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] for no bytes, or more than there are.
    pub fn alloc_host(&mut self, bytes: usize) -> Result<*mut c_void, Code> {
        let layout = Layout::from_size_align(bytes, 4096).map_err(|_| Code::InvalidValue)?;
        if bytes == 0 {
            return Err(Code::InvalidValue);
        }
        // SAFETY: the layout has bytes.
        let address = unsafe { alloc_zeroed(layout) };
        if address.is_null() {
            return Err(Code::InvalidValue);
        }
        self.host.insert(address as usize, layout);
        Ok(address.cast())
    }

    /// Frees pinned memory of the host.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] unless [`alloc_host`](Self::alloc_host) gave the address.
    pub fn free_host(&mut self, address: *mut c_void) -> Result<(), Code> {
        let layout = self.host.remove(&(address as usize)).ok_or(Code::InvalidValue)?;
        // SAFETY: it was allocated with this layout, and nobody freed it.
        unsafe { dealloc(address.cast(), layout) };
        Ok(())
    }

    /// Bytes that are not allocated.
    pub fn free_bytes(&self) -> u64 {
        MEMORY - self.allocated
    }

    /// Loads PTX.
    ///
    /// # Errors
    /// [`Code::InvalidPtx`].
    pub fn load(&mut self, ptx: String) -> Result<usize, Code> {
        let module = Loaded::new(ptx).map_err(|error| {
            eprintln!("sim-cuda: a module does not parse: {error}");
            Code::InvalidPtx
        })?;
        let handle = self.handle();
        self.registry.add_module(handle, module);
        Ok(handle)
    }

    /// Sets the dynamic shared memory that launches of a kernel may have.
    ///
    /// # Errors
    /// [`Code::InvalidValue`] if the device does not have as much.
    pub fn set_dynamic_shared(&mut self, function: usize, bytes: u32) -> Result<(), Code> {
        let most = u64::from(Limits::of(self.config.arch).shared_optin);
        let function = self.registry.function(function)?;
        if u64::from(bytes) + function.static_shared() > most {
            return Err(Code::InvalidValue);
        }
        function.dynamic_shared = bytes;
        Ok(())
    }

    /// Runs a kernel, to its end.
    ///
    /// # Errors
    /// What the launch would leave behind on hardware; the report is on the standard error output.
    pub fn launch(&mut self, call: &Call) -> Result<(), Code> {
        if call.dynamic_shared > call.function.dynamic_shared {
            return Err(Code::InvalidValue);
        }
        let Self { memory, recorder, config, .. } = self;
        let read = |range: &ptx_sim::Range| memory.copy_from(range.address, range.bytes);
        let recording = recorder.as_mut().and_then(|recorder| recorder.start(call, memory.ranges(), read));
        let launch = Launch {
            grid: call.grid,
            block: call.block,
            params: call.params.iter().cloned().map(Param::Bytes).collect(),
            dynamic_shared: u64::from(call.dynamic_shared),
            seed: config.seed,
            ..Launch::new(&call.function.module.module, &call.function.entry().name)
        };
        let result = launch.run(memory);
        if let (Some(recorder), Some(recording)) = (recorder, recording) {
            recorder.finish(recording, read);
        }
        result.map(|_| ()).map_err(|error| self.fail(call, &error))
    }

    /// Reports an error and keeps it, if hardware would.
    fn fail(&mut self, call: &Call, error: &SimError) -> Code {
        let text = report::text(call, error, self.config.seed);
        if self.reported.insert(text.clone()) {
            eprintln!("{text}");
        }
        let code = match error.kind {
            Fault::BadLaunch { .. } => return Code::OutOfResources,
            Fault::NoEntry(_) | Fault::UnknownInstruction(_) | Fault::BadOperand { .. } => return Code::InvalidPtx,
            Fault::OutOfBounds { .. } => Code::IllegalAddress,
            Fault::Misaligned { .. } => Code::MisalignedAddress,
            _ => Code::LaunchFailed,
        };
        self.failed = Some(code);
        code
    }
}
