//! One text for one kernel.

use std::collections::HashMap;

/// The source with its variables (`v` and a number) numbered in the order in which they appear. CubeCL numbers some of them by the
/// order of a hash map, which is another one in each process: what is compiled could not be found again.
pub(crate) fn renumbered(source: &str) -> String {
    let mut numbers = HashMap::new();
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut before = None;
    while let Some(next) = rest.chars().next() {
        let len = match variable(rest) {
            // Part of another name, or of an instruction (`ld.global.v4`).
            Some(len) if !before.is_some_and(|char| is_name(char) || char == '.') => {
                let count = numbers.len();
                let number = *numbers.entry(&rest[..len]).or_insert(count);
                out.push_str(&format!("v{number}"));
                len
            }
            _ => {
                out.push(next);
                next.len_utf8()
            }
        };
        before = rest[..len].chars().next_back();
        rest = &rest[len..];
    }
    out
}

/// The length of the variable that a text begins with.
fn variable(text: &str) -> Option<usize> {
    let digits = text.strip_prefix('v')?;
    let count = digits.bytes().take_while(u8::is_ascii_digit).count();
    let ends = !digits[count..].chars().next().is_some_and(is_name);
    (count > 0 && ends).then_some(1 + count)
}

fn is_name(char: char) -> bool {
    char.is_ascii_alphanumeric() || char == '_'
}

#[cfg(test)]
mod tests {
    use super::renumbered;

    #[test]
    fn variables_are_numbered_in_their_order() {
        assert_eq!(renumbered("float v7 = v3[v7] + v3[v70];"), "float v0 = v1[v0] + v1[v2];");
        assert_eq!(renumbered("v9"), "v0");
    }

    #[test]
    fn other_names_stay() {
        let text = "info_v21, v4x, _v1, vec2 ld.global.v4.f32 3.v2 é";
        assert_eq!(renumbered(text), text);
        assert_eq!(renumbered("{v8.x, -v8}"), "{v0.x, -v0}");
    }

    /// Two texts that differ in numbers alone are one; two that use the same variable elsewhere are not.
    #[test]
    fn the_same_kernel_is_the_same_text() {
        assert_eq!(renumbered("v5 = v1 + v2; v2 = v5;"), renumbered("v6 = v2 + v1; v1 = v6;"));
        assert_ne!(renumbered("v5 = v1 + v2; v2 = v5;"), renumbered("v5 = v1 + v2; v1 = v5;"));
    }
}
