//! What can be read from what the compilers say, and from machine code.

/// What is known of a compiled kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Registers of a thread.
    pub registers: usize,
    /// Bytes that a thread stores to and loads from local memory because registers ran out.
    pub spill_bytes: usize,
    /// Bytes of local memory of a thread.
    pub stack_bytes: usize,
    /// Shared memory of a cube in bytes.
    pub shared_bytes: usize,
    /// Warnings of ptxas, such as C7510 (serialised wgmma), and exchanges that do not name all lanes.
    pub warnings: Vec<String>,
    /// Exchanges of a warp's lanes.
    pub exchanges: usize,
    /// Those to which lanes may come apart: where, and why.
    pub parted: Vec<String>,
    /// Machine instructions.
    pub instructions: usize,
    /// How often each of [`OPCODES`] occurs.
    pub opcodes: [usize; OPCODES.len()],
}

/// Opcodes that say what a kernel does: matrix products, loads of matrices, copies, register shares, barriers, exchanges of
/// a warp, local memory.
pub const OPCODES: [&str; 19] = [
    "HMMA",
    "HGMMA",
    "WARPGROUP",
    "UTCHMMA",
    "UTCQMMA",
    "UTCBAR",
    "LDTM",
    "STTM",
    "UTMALDG",
    "UTMASTG",
    "UBLKCP",
    "LDGSTS",
    "LDSM",
    "USETMAXREG",
    "SYNCS",
    "BAR",
    "SHFL",
    "STL",
    "LDL",
];

impl Report {
    /// From what `ptxas -v` says and from the machine code.
    pub(super) fn read(log: &str, sass: &str) -> Self {
        let mut report = Self::default();
        for line in log.lines() {
            if line.contains("bytes stack frame") {
                // Functions that are not inlined have lines of their own.
                report.stack_bytes += number_before(line, " bytes stack frame");
                report.spill_bytes +=
                    number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
            } else if line.contains("warning") || line.contains("(C7") {
                report.warnings.push(line.trim().into());
            } else if line.contains(" registers") {
                report.registers = report.registers.max(number_before(line, " registers"));
                report.shared_bytes = number_before(line, " bytes smem");
            }
        }
        for opcode in sass.lines().filter_map(opcode) {
            report.instructions += 1;
            let base = opcode.split('.').next().unwrap_or(opcode);
            if let Some(index) = OPCODES.iter().position(|known| *known == base) {
                report.opcodes[index] += 1;
            }
        }
        report
    }

    /// A figure by its name in the limits: `regs`, `spills`, `stack`, `shared`, `exchanges`, `parted`, `instructions` or
    /// an opcode.
    pub fn figure(&self, name: &str) -> Option<usize> {
        Some(match name {
            "regs" => self.registers,
            "spills" => self.spill_bytes,
            "stack" => self.stack_bytes,
            "shared" => self.shared_bytes,
            "exchanges" => self.exchanges,
            "parted" => self.parted.len(),
            "instructions" => self.instructions,
            opcode => self.opcodes[OPCODES.iter().position(|known| *known == opcode)?],
        })
    }

    /// The opcodes that occur.
    pub fn opcodes(&self) -> String {
        let some = OPCODES.iter().zip(self.opcodes).filter(|(_, count)| *count > 0);
        some.map(|(opcode, count)| format!("{opcode} {count}")).collect::<Vec<_>>().join(", ")
    }
}

/// The number before a word.
fn number_before(line: &str, word: &str) -> usize {
    let Some(end) = line.find(word) else { return 0 };
    line[..end].split_whitespace().last().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// The opcode of a line `/*0a10*/ @!P0 LDL.LU R4, [R1] ;`.
fn opcode(line: &str) -> Option<&str> {
    let (_, instruction) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let mut words = instruction.trim_end().strip_suffix(';')?.split_whitespace();
    words.find(|word| !word.starts_with('@') && *word != "{").map(|word| word.trim_end_matches(';'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'kernel'
ptxas info    : Function properties for kernel
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 227 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 0.000 ms
";

    const SASS: &str = "\
\t.section\t.text.kernel,\"ax\",@progbits
.L_x_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 STL.64 [R1+0x8], R2 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/               @P1 BRA `(.L_x_0) ;
";

    #[test]
    fn figures_are_read() {
        let report = Report::read(LOG, SASS);
        assert_eq!((report.registers, report.spill_bytes, report.stack_bytes), (227, 20, 16));
        assert_eq!((report.shared_bytes, report.instructions), (1024, 4));
        assert_eq!(report.opcodes(), "HMMA 1, STL 1");
        assert_eq!(report.figure("STL"), Some(1));
        assert_eq!(report.figure("LDL"), Some(0));
        assert_eq!(report.figure("HMA"), None);
        assert_eq!(report.warnings.len(), 1, "{:?}", report.warnings);
    }
}
