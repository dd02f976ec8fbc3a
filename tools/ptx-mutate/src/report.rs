//! What the run says: a table by operator, and every survivor.
use crate::explain::{Context, Explanation, without_numbers};
use crate::mutant::Mutant;
use crate::run::{Kill, Verdict};
use std::collections::BTreeMap;
use std::fmt::Write;

/// A mutant and what became of it.
#[derive(Debug)]
pub struct Judged<'a> {
    /// The kernel's name.
    pub kernel: &'a str,
    /// The mutant.
    pub mutant: &'a Mutant,
    /// What became of it.
    pub verdict: &'a Verdict,
    /// Whether the cases reach it.
    pub reached: bool,
    /// Lines of the PTX.
    pub text: &'a [&'a str],
    /// Lines of the CUDA source, if there are any.
    pub cuda: &'a [&'a str],
}

/// Lines of PTX that an explanation sees on either side, blank ones, comments and `.loc` not counted.
const NEIGHBOURS: usize = 12;

impl Judged<'_> {
    fn cuda_line(&self) -> &str {
        let line = self.mutant.loc.map_or(0, |loc| loc.line as usize);
        self.cuda.get(line.wrapping_sub(1)).map_or("", |line| line.trim())
    }

    /// What explanations are compared with.
    pub fn context(&self) -> Context<'_> {
        let at = self.mutant.line as usize;
        let is_code = |line: &&&str| {
            let line = line.trim();
            !(line.is_empty() || line.starts_with(".loc") || line.starts_with("//"))
        };
        let before = self.text.get(..at.saturating_sub(1)).unwrap_or_default();
        let mut above: Vec<&str> = before.iter().rev().filter(is_code).take(NEIGHBOURS).copied().collect();
        above.reverse();
        let behind = self.text.get(at..).filter(|_| at > 0).unwrap_or_default();
        let below: Vec<&str> = behind.iter().filter(is_code).take(NEIGHBOURS).copied().collect();
        let (above, below) = (without_numbers(&above.join("\n")), without_numbers(&below.join("\n")));
        Context { kernel: self.kernel, above, below, cuda: self.cuda_line() }
    }

    fn write(&self, out: &mut String) {
        let loc = self.mutant.loc.map_or(String::new(), |loc| format!(" (CUDA line {})", loc.line));
        let never = if self.reached { "" } else { " (no case gets there)" };
        let _ = writeln!(out, "- {} `{}`{loc}{never}", self.mutant.id, shortened(&self.mutant.ptx, 160));
        if !self.cuda_line().is_empty() {
            let _ = writeln!(out, "  `{}`", shortened(self.cuda_line(), 160));
        }
    }
}

fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most { text.to_string() } else { text.chars().take(most).collect::<String>() + " ..." }
}

#[derive(Default)]
struct Row {
    mutants: usize,
    killed: [usize; Kill::ALL.len()],
    explained: usize,
    survived: usize,
}

/// The findings of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// The text.
    pub text: String,
    /// Survivors that nothing explains, and mutants on which the simulator panicked.
    pub open: usize,
    /// Explanations that explain more than they say.
    pub stale: usize,
    /// How many survivors each explanation explains.
    pub used: Vec<usize>,
}

/// Writes the report of one kernel.
pub fn report(judged: &[Judged], explanations: &[Explanation]) -> Report {
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    let mut explained: Vec<usize> = vec![0; explanations.len()];
    let mut known: Vec<usize> = vec![0; explanations.len()];
    let mut report = Report::default();
    let mut open = String::new();
    for item in judged {
        let context = item.context();
        let matching = explanations.iter().position(|e| e.matches(item.mutant, &context));
        matching.into_iter().for_each(|i| known[i] += 1);
        let row = rows.entry(item.mutant.operator).or_default();
        row.mutants += 1;
        match (item.verdict, matching) {
            (Verdict::Killed { by, .. }, _) => row.killed[*by as usize] += 1,
            (Verdict::Survived, Some(i)) => {
                explained[i] += 1;
                row.explained += 1;
            }
            (Verdict::Survived, None) => {
                row.survived += 1;
                item.write(&mut open);
            }
            (Verdict::Panicked { case }, _) => {
                row.survived += 1;
                let _ = writeln!(open, "- the simulator panicked in {case}:");
                item.write(&mut open);
            }
        }
    }
    report.open = rows.values().map(|r| r.survived).sum();
    table(&rows, &mut report.text);
    if !open.is_empty() {
        let _ = writeln!(report.text, "\nSurvivors without an explanation:\n{open}");
    }
    for (explanation, (explained, known)) in explanations.iter().zip(explained.iter().zip(&known)) {
        let wrong = *explained > explanation.most;
        if wrong {
            let most = explanation.most;
            let of = format!("{explained} survivors, {known} mutants match, at most {most} expected");
            let _ = writeln!(report.text, "Explanation is stale ({of}): {explanation}");
        }
        report.stale += usize::from(wrong);
    }
    report.used = explained;
    report
}

fn table(rows: &BTreeMap<&str, Row>, out: &mut String) {
    let _ = writeln!(
        out,
        "| operator | mutants | order | deadlock | bounds | uninitialised | result | endless | other | explained | survived |"
    );
    let _ = writeln!(out, "|---|---|---|---|---|---|---|---|---|---|---|");
    let mut all = Row::default();
    for (operator, row) in rows {
        line(operator, row, out);
        all.mutants += row.mutants;
        all.explained += row.explained;
        all.survived += row.survived;
        all.killed.iter_mut().zip(row.killed).for_each(|(sum, n)| *sum += n);
    }
    line("all", &all, out);
}

fn line(operator: &str, row: &Row, out: &mut String) {
    let killed: String = row.killed.iter().map(|n| format!(" {n} |")).collect();
    let _ = writeln!(out, "| {operator} | {} |{killed} {} | {} |", row.mutants, row.explained, row.survived);
}
