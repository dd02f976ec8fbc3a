//! What kernels may use and must contain: the file `offline-limits.txt`.
//!
//! A line is a kernel, its architectures and conditions: `mla_plan.shares sm_80,sm_90a regs<=40 shared<=17424`. Figures are
//! those of [`Report::figure`]. `#` starts a comment.
//!
//! At the top are lines for several kernels: a name that ends in `*` stands for all that begin so, `*` as an architecture for
//! all. Below, each kernel has lines for all of its architectures; neighbours with the same conditions share one. Where two lines
//! limit the same figure in the same direction, the later one counts.
//!
//! What allows local memory ([`EXCEPTIONS`]), or exchanges of lanes that may have parted, has its reason in a comment above it, or
//! above the first of several such lines that follow each other.

use super::Report;

/// The limits of all kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Everything above the kernels' lines, as written.
    head: String,
    /// Lines for several kernels.
    rules: Vec<Rule>,
    /// One for a kernel and an architecture.
    kernels: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    /// Lines of comment directly above; of an exception those above the first of several.
    notes: Vec<String>,
    kernel: String,
    arch: String,
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Condition {
    figure: String,
    /// `<=`, otherwise `>=`.
    most: bool,
    value: usize,
}

/// Registers are allotted to threads by this number; limits are multiples of it. Hence a change within the same allotment,
/// which costs nothing, is none of the limits' business.
const REGISTERS: usize = 8;
/// The most that a thread has.
const MAX_REGISTERS: usize = 255;
/// Figures that no kernel should have.
const EXCEPTIONS: [&str; 5] = ["spills", "stack", "STL", "LDL", "parted"];

impl Limits {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// The first line that is none, with its number.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut limits = Self { head: String::new(), rules: Vec::new(), kernels: Vec::new() };
        let mut notes = Vec::new();
        // Of the line above, if that is an exception.
        let mut reason = Vec::new();
        for (number, line) in text.lines().enumerate() {
            if line.starts_with('#') {
                notes.push(line.to_string());
                continue;
            }
            let rule = match line.trim() {
                "" => None,
                line => Some(Rule::read(line).map_err(|error| format!("line {}: {error}", number + 1))?),
            };
            let is_exception = rule.as_ref().is_some_and(Rule::is_exception);
            if is_exception && notes.is_empty() && reason.is_empty() {
                return Err(format!("line {}: an exception without a reason above it", number + 1));
            }
            reason = match is_exception {
                true if notes.is_empty() => reason,
                true => notes.clone(),
                false => Vec::new(),
            };
            match rule {
                Some(rule) if !rule.is_general() => {
                    let mut own = std::mem::take(&mut notes);
                    for arch in rule.arch.split(',').map(String::from) {
                        let notes = if is_exception { reason.clone() } else { std::mem::take(&mut own) };
                        limits.kernels.push(Rule { notes, arch, ..rule.clone() });
                    }
                }
                _ if limits.kernels.is_empty() => {
                    for line in notes.drain(..).chain([line.to_string()]) {
                        limits.head += &(line + "\n");
                    }
                    limits.rules.extend(rule);
                }
                Some(_) => return Err(format!("line {}: a line for several kernels, below those of one", number + 1)),
                None => {}
            }
        }
        Ok(limits)
    }

    /// What a compiled kernel violates.
    pub fn violations(&self, kernel: &str, arch: &str, report: &Report) -> Vec<String> {
        // Held even where no line says so.
        let none = |figure: &str| Condition { figure: figure.into(), most: true, value: 0 };
        let mut conditions = vec![none("spills"), none("parted")];
        let lines = self.rules.iter().chain(&self.kernels);
        for condition in lines.filter(|line| line.is_of(kernel, arch)).flat_map(|line| &line.conditions) {
            conditions.retain(|other| (&other.figure, other.most) != (&condition.figure, condition.most));
            conditions.push(condition.clone());
        }
        let mut violations: Vec<String> =
            conditions.iter().filter_map(|condition| condition.violation(report)).collect();
        if violations.iter().any(|violation| violation.starts_with("parted")) {
            violations.extend(report.parted.iter().cloned());
        }
        violations.extend(report.warnings.iter().cloned());
        if self.line_of(kernel, arch).is_none() {
            violations.push("has no limits: add a line (--write-limits does)".into());
        }
        violations
    }

    /// Lines that stand for none of these kernels and architectures.
    pub fn unused<'a>(&'a self, known: &'a [(&str, &str)]) -> impl Iterator<Item = String> + 'a {
        let lines = self.rules.iter().chain(&self.kernels);
        let unused = lines.filter(|line| !known.iter().any(|(kernel, arch)| line.is_of(kernel, arch)));
        unused.map(|line| format!("{} {}: a line without a kernel", line.kernel, line.arch))
    }

    /// Sets the registers and shared memory of all kernels to what they are, and drops the lines of others.
    pub fn refresh(&mut self, reports: &[(&str, &str, &Report)]) {
        let kernels = reports.iter().map(|&(kernel, arch, report)| {
            let mut line = self.line_of(kernel, arch).cloned().unwrap_or_else(|| Rule {
                notes: Vec::new(),
                kernel: kernel.into(),
                arch: arch.into(),
                conditions: Vec::new(),
            });
            line.conditions.retain(|condition| !condition.most || !matches!(&*condition.figure, "regs" | "shared"));
            let registers = report.registers.next_multiple_of(REGISTERS).min(MAX_REGISTERS);
            let most = |figure: &str, value| Condition { figure: figure.into(), most: true, value };
            line.conditions.splice(0..0, [most("regs", registers), most("shared", report.shared_bytes)]);
            line
        });
        self.kernels = kernels.collect();
    }

    /// The text of the file.
    pub fn write(&self) -> String {
        let mut text = self.head.clone();
        let mut above: Option<&Rule> = None;
        for lines in self.kernels.chunk_by(|above, line| line.shares_line(above)) {
            let line = &lines[0];
            let has_reason = above.is_some_and(|above| line.shares_reason(above));
            above = Some(line);
            for note in line.notes.iter().filter(|_| !has_reason) {
                text += &format!("{note}\n");
            }
            let conditions: Vec<String> = line.conditions.iter().map(Condition::text).collect();
            let archs: Vec<&str> = lines.iter().map(|line| &*line.arch).collect();
            text += &format!("{} {} {}\n", line.kernel, archs.join(","), conditions.join(" "));
        }
        text
    }

    fn line_of(&self, kernel: &str, arch: &str) -> Option<&Rule> {
        self.kernels.iter().find(|line| line.is_of(kernel, arch))
    }
}

impl Rule {
    fn read(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let (Some(kernel), Some(arch)) = (words.next(), words.next()) else {
            return Err("expected a kernel, an architecture and conditions".into());
        };
        let conditions = words.map(Condition::read).collect::<Result<_, _>>()?;
        Ok(Self { notes: Vec::new(), kernel: kernel.into(), arch: arch.into(), conditions })
    }

    /// Whether it allows what no kernel should have.
    fn is_exception(&self) -> bool {
        self.conditions.iter().any(|one| one.most && one.value > 0 && EXCEPTIONS.contains(&&*one.figure))
    }

    /// Whether it is an exception for the reason of the line above.
    fn shares_reason(&self, above: &Self) -> bool {
        self.is_exception() && above.is_exception() && above.notes == self.notes
    }

    /// Whether it can be written into the line above.
    fn shares_line(&self, above: &Self) -> bool {
        let has_notes = !self.notes.is_empty() && !self.shares_reason(above);
        !has_notes && self.kernel == above.kernel && self.conditions == above.conditions
    }

    fn is_general(&self) -> bool {
        self.kernel.ends_with('*') || self.arch == "*"
    }

    fn is_of(&self, kernel: &str, arch: &str) -> bool {
        let named = match self.kernel.strip_suffix('*') {
            Some(start) => kernel.starts_with(start),
            None => kernel == self.kernel,
        };
        named && (self.arch == "*" || self.arch == arch)
    }
}

impl Condition {
    fn read(word: &str) -> Result<Self, String> {
        let wrong = || format!("{word}, expected a condition like regs<=128 or HMMA>=1");
        let at = word.find(['<', '>']).ok_or_else(wrong)?;
        let (figure, rest) = word.split_at(at);
        let value = rest.get(1..).and_then(|rest| rest.strip_prefix('=')).ok_or_else(wrong)?;
        if Report::default().figure(figure).is_none() {
            return Err(format!("{figure} is no figure of a kernel"));
        }
        let value = value.parse().map_err(|_| wrong())?;
        Ok(Self { figure: figure.into(), most: rest.starts_with('<'), value })
    }

    fn text(&self) -> String {
        format!("{}{}{}", self.figure, if self.most { "<=" } else { ">=" }, self.value)
    }

    fn violation(&self, report: &Report) -> Option<String> {
        let actual = report.figure(&self.figure)?;
        let good = if self.most { actual <= self.value } else { actual >= self.value };
        (!good).then(|| format!("{} is {actual}, expected {}", self.figure, self.text()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# All kernels.
* * stack<=0 STL<=0
mla_decode.mma.* * HMMA>=1

merge sm_80 regs<=32 shared<=0
# A reason.
merge sm_90a regs<=40 shared<=16 stack<=8
plan sm_80,sm_90a regs<=24 shared<=0
";

    fn report(registers: usize) -> Report {
        Report { registers, ..Report::default() }
    }

    #[test]
    fn what_is_read_is_written() {
        let limits = Limits::read(TEXT).expect("all lines are right");
        let words = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<_>>();
        assert_eq!(words(&limits.write()), words(TEXT));
        assert_eq!(Limits::read(&limits.write()), Ok(limits));
    }

    #[test]
    fn a_limit_that_is_exceeded_is_named() {
        let limits = Limits::read(TEXT).expect("all lines are right");
        assert!(limits.violations("merge", "sm_80", &report(32)).is_empty());
        assert_eq!(limits.violations("merge", "sm_80", &report(33)), ["regs is 33, expected regs<=32"]);
        let spills = Report { spill_bytes: 4, ..report(1) };
        assert_eq!(limits.violations("merge", "sm_80", &spills), ["spills is 4, expected spills<=0"]);
        let warns = Report { warnings: vec!["C7510".into()], ..report(1) };
        assert_eq!(limits.violations("merge", "sm_80", &warns), ["C7510"]);
    }

    #[test]
    fn a_later_line_replaces_a_limit() {
        let limits = Limits::read(TEXT).expect("all lines are right");
        let stack = Report { stack_bytes: 8, ..report(1) };
        assert_eq!(limits.violations("merge", "sm_80", &stack), ["stack is 8, expected stack<=0"]);
        assert!(limits.violations("merge", "sm_90a", &stack).is_empty());
    }

    #[test]
    fn kernels_and_lines_need_each_other() {
        let limits = Limits::read(TEXT).expect("all lines are right");
        let violations = limits.violations("mla_decode.mma.1", "sm_80", &report(1));
        assert_eq!(violations[0], "HMMA is 0, expected HMMA>=1");
        assert!(violations[1].contains("no limits"), "{violations:?}");
        let unused: Vec<_> = limits.unused(&[("merge", "sm_80"), ("mla_decode.mma.1", "sm_80")]).collect();
        let lines = ["merge sm_90a", "plan sm_80", "plan sm_90a"];
        assert_eq!(unused, lines.map(|line| format!("{line}: a line without a kernel")));
    }

    #[test]
    fn exceptions_have_a_reason() {
        for (text, error) in [
            ("merge sm_80 spills<=8", Some("line 1: an exception")),
            ("# Why.\nmerge sm_80 LDL<=1", None),
            ("# Why.\nmerge sm_80,sm_90a spills<=8\nother sm_80 spills<=8", None),
            ("plan sm_80 STL<=0\n# Not why.\nplan sm_90a,sm_100a STL<=0", None),
            ("# Why.\nmerge sm_80 spills<=8\nmerge sm_90a STL<=0\nnew sm_80 STL<=1", Some("line 4: an exception")),
            ("# Why.\n\nmerge sm_80 spills<=8", Some("line 3: an exception")),
            ("merge* * parted<=1\n", Some("line 1: an exception")),
        ] {
            let read = Limits::read(text);
            match error {
                Some(error) => assert!(read.as_ref().is_err_and(|it| it.starts_with(error)), "{text}: {read:?}"),
                None => assert_eq!(read.expect(text).write().trim_end(), text),
            }
        }
    }

    #[test]
    fn lanes_that_part_are_named() {
        let limits = Limits::read(TEXT).expect("all lines are right");
        let parted = Report { parted: vec!["0x0010: SHFL".into()], ..report(1) };
        assert_eq!(limits.violations("merge", "sm_80", &parted), ["parted is 1, expected parted<=0", "0x0010: SHFL"]);
    }

    #[test]
    fn refreshing_keeps_comments_and_other_conditions() {
        let mut limits = Limits::read(TEXT).expect("all lines are right");
        limits.refresh(&[("merge", "sm_90a", &report(50)), ("new", "sm_80", &report(255))]);
        let written = limits.write();
        assert!(written.contains("# A reason.\nmerge sm_90a regs<=56 shared<=0 stack<=8\n"), "{written}");
        assert!(written.contains("new sm_80 regs<=255 shared<=0\n"), "{written}");
        assert!(!written.contains("merge sm_80"), "{written}");
        assert!(written.starts_with("# All kernels.\n* * stack<=0 STL<=0\n"), "{written}");
    }

    #[test]
    fn lines_that_say_nothing_are_refused() {
        for (text, expected) in [
            ("merge", "line 1: expected a kernel"),
            ("merge sm_80 regs=3", "expected a condition"),
            ("merge sm_80 HMA>=1", "HMA is no figure"),
            ("merge sm_80 shared<=0\n* * stack<=0", "line 2: a line for several"),
        ] {
            let error = Limits::read(text).expect_err(text);
            assert!(error.contains(expected), "{error}");
        }
    }
}
