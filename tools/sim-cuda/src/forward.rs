//! A real driver that gets all calls, and what its program has allocated and loaded: enough to record launches.
use crate::config::Config;
use crate::module::{Call, Loaded, Registry};
use crate::real_graphs::RealGraphs;
use crate::record::{Recorder, Recording};
use libloading::Library;
use ptx_sim::{Range, TENSOR_MAP_BYTES};
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The driver.
pub struct Real {
    library: Library,
    shadow: Mutex<Shadow>,
}

/// What the program has on the real device.
pub struct Shadow {
    /// Allocations: address and size.
    pub allocations: BTreeMap<u64, u64>,
    /// Modules and functions.
    pub registry: Registry,
    /// Captures and graphs.
    pub graphs: RealGraphs,
    /// The simulator's tensor maps by those of the driver.
    pub tensor_maps: HashMap<[u8; TENSOR_MAP_BYTES], [u8; TENSOR_MAP_BYTES]>,
    recorder: Option<Recorder>,
}

impl Shadow {
    /// Puts the simulator's tensor maps in the place of the driver's.
    pub fn translate(&self, params: &mut [Vec<u8>]) {
        for param in params {
            if let Some(map) = self.tensor_maps.get(param.as_slice()) {
                *param = map.to_vec();
            }
        }
    }
}

impl Real {
    /// Loads the driver.
    ///
    /// # Errors
    /// What the dynamic linker says.
    pub fn open(path: &std::path::Path, config: &Config) -> Result<Self, libloading::Error> {
        // SAFETY: a driver library; its initialisers are those that every CUDA program runs.
        let library = unsafe { Library::new(path) }?;
        let recorder = config.trace.clone().map(|trace| Recorder::new(trace, "forwarded".to_string()));
        let shadow = Shadow {
            allocations: BTreeMap::new(),
            registry: Registry::default(),
            graphs: RealGraphs::default(),
            tensor_maps: HashMap::new(),
            recorder,
        };
        Ok(Self { library, shadow: Mutex::new(shadow) })
    }

    /// A function of the driver.
    ///
    /// # Safety
    /// `F` is the type that the function of this name has.
    pub unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.library.get::<F>(name.as_bytes()) }.ok().map(|symbol| *symbol)
    }

    /// What the program has.
    pub fn shadow(&self) -> MutexGuard<'_, Shadow> {
        self.shadow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of memory of the device, after all that was under way.
    fn read(&self, range: &Range) -> Result<Vec<u8>, ()> {
        let mut bytes = vec![0; range.bytes as usize];
        // SAFETY: the types are those of cuda.h; the copy fits the vector, and the driver checks the address.
        let copied = unsafe {
            let wait = self.symbol::<unsafe extern "C" fn() -> u32>("cuCtxSynchronize").ok_or(())?;
            let copy =
                self.symbol::<unsafe extern "C" fn(*mut c_void, u64, usize) -> u32>("cuMemcpyDtoH_v2").ok_or(())?;
            wait() == 0 && copy(bytes.as_mut_ptr().cast(), range.address, bytes.len()) == 0
        };
        if copied { Ok(bytes) } else { Err(()) }
    }

    /// Whether launches are recorded.
    pub fn records(&self) -> bool {
        self.shadow().recorder.is_some()
    }

    /// Launches a kernel with `run`, recorded if it is to be.
    pub fn launch(&self, call: Option<&Call>, run: impl FnOnce() -> u32) -> u32 {
        let recording = call.and_then(|call| self.start(call));
        let result = run();
        if let Some(recording) = recording.filter(|_| result == 0)
            && let Some(recorder) = &mut self.shadow().recorder
        {
            recorder.finish(recording, |range| self.read(range));
        }
        result
    }

    fn start(&self, call: &Call) -> Option<Recording> {
        let mut shadow = self.shadow();
        let Shadow { allocations, graphs, recorder, .. } = &mut *shadow;
        if graphs.capturing() {
            return None;
        }
        let ranges = allocations.iter().map(|(address, bytes)| *address..*address + *bytes);
        recorder.as_mut()?.start(call, ranges, |range| self.read(range))
    }

    /// Keeps a module that the driver loaded.
    pub fn loaded(&self, handle: usize, ptx: String) {
        match Loaded::new(ptx) {
            Ok(module) => self.shadow().registry.add_module(handle, module),
            Err(error) => eprintln!("sim-cuda: a module does not parse, its launches are not recorded: {error}"),
        }
    }
}
