//! Local memory: each thread has its own (PTX ISA 5.1.5). What nothing wrote reads as zero.
use super::registers::LANES;
use crate::error::Fault;
use std::ops::Range;

/// Local memory of a warp's lanes, one lane's after the other's.
#[derive(Default)]
pub(crate) struct Local {
    bytes: Vec<u8>,
}

impl Local {
    pub fn new(bytes: u64) -> Self {
        Self { bytes: vec![0; bytes as usize * LANES] }
    }

    fn range(&self, access: &str, lane: usize, address: u64, bytes: u64) -> Result<Range<usize>, Fault> {
        let size = (self.bytes.len() / LANES) as u64;
        if bytes > size || address > size - bytes {
            let nearest = format!("the thread has {size} bytes of local memory");
            return Err(Fault::OutOfBounds { access: access.to_string(), address, bytes, nearest });
        }
        let start = lane * size as usize + address as usize;
        Ok(start..start + bytes as usize)
    }

    pub fn load(&self, lane: usize, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let range = self.range("local load", lane, address, into.len() as u64)?;
        into.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    pub fn store(&mut self, lane: usize, address: u64, from: &[u8]) -> Result<(), Fault> {
        let range = self.range("local store", lane, address, from.len() as u64)?;
        self.bytes[range].copy_from_slice(from);
        Ok(())
    }
}
