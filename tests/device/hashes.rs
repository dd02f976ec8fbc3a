//! Hashes of what the operations computed: `MLA_HASHES=FILE` appends a line for every tensor that a test reads back, with the
//! test's name. Two builds whose sorted files are equal computed the same bits.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Mutex, OnceLock};

/// The file, and how many tensors each test has read.
struct Record {
    file: File,
    read: HashMap<String, usize>,
}

/// Appends the hash of a tensor's bytes, where somebody asked for it.
pub fn record(bytes: &[u8]) {
    static RECORD: OnceLock<Option<Mutex<Record>>> = OnceLock::new();
    let open = || {
        let path = std::env::var_os("MLA_HASHES")?;
        let file =
            OpenOptions::new().create(true).append(true).open(path).expect("MLA_HASHES names a file to append to");
        Some(Mutex::new(Record { file, read: HashMap::new() }))
    };
    let Some(record) = RECORD.get_or_init(open) else { return };
    // The name of a test is that of its thread.
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let mut record = record.lock().expect("no test panics in here");
    let place = record.read.entry(test.clone()).or_insert(0);
    *place += 1;
    let line = format!("{test} {place} {} {:016x}\n", bytes.len(), fnv1a(bytes));
    record.file.write_all(line.as_bytes()).expect("the file takes a line");
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
