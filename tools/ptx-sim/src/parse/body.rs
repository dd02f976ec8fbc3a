//! Statements of a kernel's body.
use super::Parser;
use super::ast::{Entry, Guard, Instr, Loc, RegType, Scope};
use super::lexer::Tok;
use crate::error::ParseError;

/// What directives say of the instructions below them.
#[derive(Default)]
struct Marks {
    loc: Option<Loc>,
    /// Of the next instruction alone.
    used_bytes: Option<u32>,
}

impl Parser<'_> {
    /// The body behind its `{`, up to and with its `}`.
    pub(super) fn body(&mut self, entry: &mut Entry) -> Result<(), ParseError> {
        entry.scopes.push(Scope::default());
        let (mut scope, mut marks) = (0, Marks::default());
        loop {
            if self.eat('{') {
                entry.scopes.push(Scope { parent: Some(scope), ..Scope::default() });
                scope = entry.scopes.len() - 1;
            } else if self.eat('}') {
                match entry.scopes[scope].parent {
                    Some(parent) => scope = parent,
                    None => return Ok(()),
                }
            } else if self.eat(';') {
                // An empty statement: what an inline assembly text may end with.
            } else if self.eat('@') {
                let negated = self.eat('!');
                let guard = Guard { register: self.word()?.to_string(), negated };
                self.instruction(entry, scope, &mut marks, Some(guard))?;
            } else {
                self.statement(entry, scope, &mut marks)?;
            }
        }
    }

    fn statement(&mut self, entry: &mut Entry, scope: usize, marks: &mut Marks) -> Result<(), ParseError> {
        match self.word()? {
            ".reg" => {
                let ty = self.word()?;
                self.registers(&mut entry.scopes[scope], ty)?;
            }
            // Inline assembly may leave out the blank.
            word if word.starts_with(".reg.") => self.registers(&mut entry.scopes[scope], &word[4..])?,
            ".local" => entry.local.push(self.variable(false)?),
            ".shared" => entry.shared.push(self.variable(false)?),
            ".loc" => marks.loc = Some(self.location()?),
            ".pragma" => marks.used_bytes = self.pragma()?,
            word if word.starts_with('.') => {
                self.at -= 1;
                return Err(self.error("a directive that we know"));
            }
            label if self.eat(':') => {
                let next = entry.instrs.len();
                entry.scopes[scope].labels.insert(label.to_string(), next);
            }
            _ => {
                self.at -= 1;
                self.instruction(entry, scope, marks, None)?;
            }
        }
        Ok(())
    }

    fn instruction(
        &mut self,
        entry: &mut Entry,
        scope: usize,
        marks: &mut Marks,
        guard: Option<Guard>,
    ) -> Result<(), ParseError> {
        let line = self.line();
        let opcode = self.word()?.to_string();
        let mut operands = Vec::new();
        while !self.eat(';') {
            operands.push(self.operand()?);
            if !self.eat(',') && self.peek() != Some(Tok::Punct(';')) {
                return Err(self.error("',' or ';'"));
            }
        }
        let (loc, used_bytes) = (marks.loc, marks.used_bytes.take());
        entry.instrs.push(Instr { guard, opcode, operands, line, loc, used_bytes, scope });
        Ok(())
    }

    /// Which bytes the next load uses, if the pragma says that (PTX ISA, pragma strings, "used_bytes_mask").
    fn pragma(&mut self) -> Result<Option<u32>, ParseError> {
        let Tok::Text(text) = self.next()? else { return Err(self.error("a string before")) };
        self.skip_past(';')?;
        let Some(mask) = text.strip_prefix("used_bytes_mask") else { return Ok(None) };
        let mask = mask.trim();
        let parsed = match mask.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => mask.parse(),
        };
        parsed.map(Some).map_err(|_| self.error("a mask of 32 bits before"))
    }

    /// `.reg .b32 %r<39>;` declares `%r0` to `%r38`; `.reg .pred p, q;` names each (PTX ISA 5.4).
    fn registers(&mut self, scope: &mut Scope, ty: &str) -> Result<(), ParseError> {
        let error = self.error("a register type before");
        let ty = RegType::parse(ty).ok_or(error)?;
        loop {
            let name = self.word()?;
            if self.eat('<') {
                for index in 0..self.number()? {
                    scope.registers.insert(format!("{name}{index}"), ty);
                }
                self.expect('>')?;
            } else {
                scope.registers.insert(name.to_string(), ty);
            }
            if !self.eat(',') {
                return self.expect(';');
            }
        }
    }

    /// `1 25 0`, and where inlined: `, function_name $L__info_string0, inlined_at 1 77 1` (PTX ISA, `.loc`).
    fn location(&mut self) -> Result<Loc, ParseError> {
        let (file, line) = (self.number()? as u32, self.number()? as u32);
        self.number()?;
        let mut loc = Loc { file, line, inlined_at: None };
        while self.eat(',') {
            match self.word()? {
                "function_name" => {
                    self.word()?;
                    if self.eat('+') {
                        self.number()?;
                    }
                }
                "inlined_at" => {
                    loc.inlined_at = Some((self.number()? as u32, self.number()? as u32));
                    self.number()?;
                }
                _ => {
                    self.at -= 1;
                    return Err(self.error("'function_name' or 'inlined_at'"));
                }
            }
        }
        Ok(loc)
    }
}
