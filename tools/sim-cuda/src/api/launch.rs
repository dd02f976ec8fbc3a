//! Modules, functions, launches.
use crate::driver::{api, put};
use crate::forward::Real;
use crate::module::{Call, Function};
use crate::real_graphs::Issue;
use crate::work::Work;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const DYNAMIC_SHARED: c_uint = 8;

/// The PTX in an image that a program loads; none if it is machine code.
unsafe fn ptx(image: *const c_void) -> Option<String> {
    // SAFETY: an image is at least as long as the magic number of an ELF file, and PTX ends with a zero.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().ok()?;
    text.contains(".version").then(|| text.to_string())
}

type CallReal<'a> = &'a dyn Fn() -> u32;

api! {
    fn cuModuleLoadData(module: *mut usize, image: *const c_void) {
        |gpu| {
            gpu.captures.unsafe_call("cuModuleLoadData")?;
            put(module, gpu.load(ptx(image).ok_or(Code::InvalidPtx)?)?)
        }
    } forward {
        |real: &Real, call: CallReal| {
            let result = call();
            if result == 0 && let Some(text) = ptx(image) {
                real.loaded(*module, text);
            }
            result
        }
    }
    fn cuModuleUnload(module: usize) {
        |gpu| {
            gpu.captures.unsafe_call("cuModuleUnload")?;
            gpu.registry.remove_module(module)
        }
    }
    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        |gpu| {
            let handle = gpu.handle();
            let name = CStr::from_ptr(name).to_str().map_err(|_| Code::NotFound)?;
            gpu.registry.add_function(handle, module, name)?;
            put(function, handle)
        }
    } forward {
        |real: &Real, call: CallReal| {
            let result = call();
            if result == 0 && let Ok(name) = CStr::from_ptr(name).to_str() {
                // A module of machine code is not known; its launches are not recorded.
                let _ = real.shadow().registry.add_function(*function, module, name);
            }
            result
        }
    }
    fn cuFuncSetAttribute(function: usize, attribute: c_uint, value: c_int) {
        |gpu| match attribute {
            DYNAMIC_SHARED => gpu.set_dynamic_shared(function, value as u32),
            _ => Err(Code::NotSupported),
        }
    }
    fn cuLaunchKernel(function: usize, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, dynamic_shared: c_uint, stream: usize, params: *mut *mut c_void, extra: *mut *mut c_void) {
        |gpu| {
            if !extra.is_null() {
                return Err(Code::NotSupported);
            }
            let function = gpu.registry.function(function)?.clone();
            let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
            let params = function.arguments(params)?;
            gpu.give(stream, Work::Launch(Call { function, grid, block, dynamic_shared, params }))
        }
    } forward {
        |real: &Real, call: CallReal| {
            let handle = function;
            let known: Option<Function> = real.shadow().registry.function(function).ok().cloned();
            let known = known.filter(|_| extra.is_null()).and_then(|function| {
                let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
                let given = function.arguments(params).ok()?;
                let mut params = given.clone();
                real.shadow().translate(&mut params);
                let work = Work::Launch(Call { function, grid, block, dynamic_shared, params });
                Some(Issue { work, launch: Some((handle, given)) })
            });
            let result = real.launch(known.as_ref().and_then(Issue::call), call);
            if result == 0 {
                real.issued(stream, known);
            }
            result
        }
    }
}
