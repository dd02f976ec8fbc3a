//! Operands: constants, names, vectors, addresses (PTX ISA 4.5, 6.3, 6.4).
use super::Parser;
use super::ast::Operand;
use super::lexer::Tok;
use crate::error::ParseError;

/// An integer constant's bits: decimal, `0x`, `0b`, octal, with or without `U`.
pub(super) fn integer(text: &str) -> Option<u64> {
    let digits = text.strip_suffix('U').unwrap_or(text);
    if let Some(hex) = digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        u64::from_str_radix(hex, 16).ok()
    } else if let Some(binary) = digits.strip_prefix("0b") {
        u64::from_str_radix(binary, 2).ok()
    } else if digits.len() > 1 && digits.starts_with('0') {
        u64::from_str_radix(digits, 8).ok()
    } else {
        digits.parse().ok()
    }
}

/// A constant: `0f` and `0d` give a float's bits, decimal floats are of 64 bits (PTX ISA, "Floating-Point Constants").
fn constant(text: &str) -> Option<Operand> {
    if let Some(bits) = text.strip_prefix("0f").or(text.strip_prefix("0F")) {
        u32::from_str_radix(bits, 16).ok().map(Operand::F32)
    } else if let Some(bits) = text.strip_prefix("0d").or(text.strip_prefix("0D")) {
        u64::from_str_radix(bits, 16).ok().map(Operand::F64)
    } else if text.contains('.') {
        text.parse().ok().map(|value: f64| Operand::F64(value.to_bits()))
    } else {
        integer(text).map(Operand::Int)
    }
}

impl Parser<'_> {
    pub(super) fn operand(&mut self) -> Result<Operand, ParseError> {
        let first = self.single()?;
        if self.eat('|') {
            return Ok(Operand::Pair(Box::new(first), Box::new(self.single()?)));
        }
        Ok(first)
    }

    fn single(&mut self) -> Result<Operand, ParseError> {
        let error = self.error("an operand");
        match self.next()? {
            Tok::Punct('{') => Ok(Operand::Vector(self.list('}')?)),
            Tok::Punct('!') => Ok(Operand::Not(Box::new(self.single()?))),
            Tok::Punct('-') => match self.single()? {
                Operand::Int(bits) => Ok(Operand::Int(bits.wrapping_neg())),
                _ => Err(error),
            },
            Tok::Punct('[') => self.address(),
            Tok::Word(name) => Ok(Operand::Name(name.to_string())),
            Tok::Number(text) => constant(text).ok_or(error),
            _ => Err(error),
        }
    }

    /// Operands with commas between, up to and with `end`.
    fn list(&mut self, end: char) -> Result<Vec<Operand>, ParseError> {
        let mut operands = Vec::new();
        while !self.eat(end) {
            operands.push(self.operand()?);
            self.eat(',');
        }
        Ok(operands)
    }

    /// An address behind its `[`.
    fn address(&mut self) -> Result<Operand, ParseError> {
        let base = Box::new(self.single()?);
        let mut offset = 0i64;
        while self.peek() == Some(Tok::Punct('+')) || self.peek() == Some(Tok::Punct('-')) {
            let mut negative = self.eat('-');
            self.eat('+');
            negative ^= self.eat('-');
            let bytes = self.number()? as i64;
            offset = offset.wrapping_add(if negative { bytes.wrapping_neg() } else { bytes });
        }
        let mut coords = Vec::new();
        if self.eat(',') {
            self.expect('{')?;
            coords = self.list('}')?;
        }
        self.expect(']')?;
        Ok(Operand::Address { base, offset, coords })
    }
}
