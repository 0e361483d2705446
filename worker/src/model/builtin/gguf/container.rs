//! Fields and tensors of a GGUF file by name, each access checked.

use std::cell::Cell;
use std::io::Cursor;

use baton_kernels::Matrix;
use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};

use super::super::super::ModelError;
use super::alignment;

pub(super) struct Container<'a> {
    bytes: &'a [u8],
    file: &'a str,
    content: Content,
    /// Bytes of the file that no tensor has been read from yet, so that a small file cannot be a large model.
    unclaimed: Cell<usize>,
}

/// Characters of a problem that are shown: it may hold text of the file.
const SHOWN: usize = 200;

/// An error that is one short line whatever the file holds.
fn malformed(file: &str, field: &str, problem: &str) -> ModelError {
    let mut characters = problem.chars().flat_map(visible);
    let mut shown: String = characters.by_ref().take(SHOWN).collect();
    if characters.next().is_some() {
        shown.push('…');
    }
    ModelError::Malformed {
        file: file.to_owned(),
        field: field.to_owned(),
        problem: shown,
    }
}

fn visible(character: char) -> impl Iterator<Item = char> {
    let escaped = character.is_control().then(|| character.escape_default());
    let plain = escaped.is_none().then_some(character);
    escaped.into_iter().flatten().chain(plain)
}

impl<'a> Container<'a> {
    pub(super) fn open(bytes: &'a [u8], file: &'a str) -> Result<Self, ModelError> {
        let malformed = |field: &str, problem: String| malformed(file, field, &problem);
        if !bytes.starts_with(b"GGUF") {
            return Err(malformed(
                "header",
                "is not a GGUF file, it does not begin with `GGUF`".to_owned(),
            ));
        }
        if let Some(problem) = alignment::problem(bytes) {
            return Err(malformed("general.alignment", problem));
        }
        let content = Content::read(&mut Cursor::new(bytes))
            // The parser's own error may carry a backtrace; its first line says what it met.
            .map_err(|error| {
                let text = error.to_string();
                let first = text.lines().next().unwrap_or_default();
                malformed(
                    "header",
                    format!("is damaged or cut off after {} bytes: {first}", bytes.len()),
                )
            })?;
        Ok(Self {
            unclaimed: Cell::new(bytes.len()),
            bytes,
            file,
            content,
        })
    }

    pub(super) fn file(&self) -> &str {
        self.file
    }

    pub(super) fn malformed(&self, field: &str, problem: impl Into<String>) -> ModelError {
        malformed(self.file, field, &problem.into())
    }

    pub(super) fn has_field(&self, field: &str) -> bool {
        self.content.metadata.contains_key(field)
    }

    /// Whether there is such a tensor.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.content.tensor_infos.contains_key(tensor)
    }

    fn value(&self, field: &str) -> Result<&Value, ModelError> {
        self.content
            .metadata
            .get(field)
            .ok_or_else(|| self.malformed(field, "is missing".to_owned()))
    }

    pub(super) fn text(&self, field: &str) -> Result<&str, ModelError> {
        match self.value(field)? {
            Value::String(text) => Ok(text),
            other => Err(self.wrong_type(field, other, "text")),
        }
    }

    pub(super) fn flag(&self, field: &str) -> Result<bool, ModelError> {
        match self.value(field)? {
            Value::Bool(flag) => Ok(*flag),
            other => Err(self.wrong_type(field, other, "a truth value")),
        }
    }

    pub(super) fn array(&self, field: &str) -> Result<&[Value], ModelError> {
        match self.value(field)? {
            Value::Array(values) => Ok(values),
            other => Err(self.wrong_type(field, other, "an array")),
        }
    }

    pub(super) fn number(&self, field: &str) -> Result<f64, ModelError> {
        let value = self.value(field)?;
        match value {
            Value::F32(number) => Ok(f64::from(*number)),
            Value::F64(number) => Ok(*number),
            other => integer(other)
                .map(|number| number as f64)
                .ok_or_else(|| self.wrong_type(field, other, "a number")),
        }
    }

    /// A whole number from 1 to `most`.
    pub(super) fn size(&self, field: &str, most: u64) -> Result<usize, ModelError> {
        let value = self.value(field)?;
        let Some(number) = integer(value) else {
            return Err(self.wrong_type(field, value, "a whole number"));
        };
        usize::try_from(number)
            .ok()
            .filter(|size| *size >= 1 && *size as u64 <= most)
            .ok_or_else(|| self.malformed(field, format!("{number} is not within 1 and {most}")))
    }

    pub(super) fn token_id(&self, field: &str, vocabulary: usize) -> Result<u32, ModelError> {
        let value = self.value(field)?;
        integer(value)
            .and_then(|id| u32::try_from(id).ok())
            .filter(|id| (*id as usize) < vocabulary)
            .ok_or_else(|| self.malformed(field, format!("is not an id below {vocabulary}")))
    }

    fn wrong_type(&self, field: &str, found: &Value, expected: &str) -> ModelError {
        let found = found.value_type();
        self.malformed(field, format!("is {found:?}, not {expected}"))
    }

    /// Rows of a matrix whose number of columns is known.
    pub(super) fn rows(&self, tensor: &str, columns: usize) -> Result<usize, ModelError> {
        match self.info(tensor)?.shape.dims() {
            [rows, found] if *found == columns && *rows > 0 => Ok(*rows),
            dims => Err(self.malformed(
                tensor,
                format!("has shape {dims:?}, expected rows of {columns}"),
            )),
        }
    }

    fn info(&self, tensor: &str) -> Result<&TensorInfo, ModelError> {
        self.content
            .tensor_infos
            .get(tensor)
            .ok_or_else(|| self.malformed(tensor, "tensor is missing".to_owned()))
    }

    /// The bytes of a tensor of exactly this shape.
    fn data(&self, tensor: &str, shape: &[usize]) -> Result<(GgmlDType, &'a [u8]), ModelError> {
        let info = self.info(tensor)?;
        if info.shape.dims() != shape {
            return Err(self.malformed(
                tensor,
                format!("has shape {:?}, expected {shape:?}", info.shape.dims()),
            ));
        }
        let dtype = info.ggml_dtype;
        let width = shape.last().copied().unwrap_or(0);
        if !width.is_multiple_of(dtype.block_size()) {
            return Err(self.malformed(
                tensor,
                format!("rows of {width} are not whole blocks of {dtype:?}"),
            ));
        }
        let size = shape
            .iter()
            .try_fold(1_usize, |size, dim| size.checked_mul(*dim))
            .and_then(|size| (size / dtype.block_size()).checked_mul(dtype.type_size()));
        let data = usize::try_from(self.content.tensor_data_offset)
            .ok()
            .zip(usize::try_from(info.offset).ok())
            .and_then(|(base, offset)| base.checked_add(offset))
            .zip(size)
            .and_then(|(start, size)| self.bytes.get(start..start.checked_add(size)?));
        let data = data.ok_or_else(|| {
            self.malformed(
                tensor,
                format!(
                    "reaches past the end of the file ({} bytes): it is cut off, fetch it again",
                    self.bytes.len()
                ),
            )
        })?;
        let unclaimed = self
            .unclaimed
            .get()
            .checked_sub(data.len())
            .ok_or_else(|| {
                let problem = "lies where another tensor lies: the file is damaged, fetch it again";
                self.malformed(tensor, problem.to_owned())
            })?;
        self.unclaimed.set(unclaimed);
        Ok((dtype, data))
    }

    /// Reads a vector as f32.
    pub(super) fn vector(&self, tensor: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        let (dtype, data) = self.data(tensor, &[length])?;
        self.widen(tensor, dtype, data)
    }

    /// Reads a matrix; 4- and 8-bit blocks are kept as they are, anything else is requantised to 8 bits.
    pub(super) fn matrix(
        &self,
        tensor: &str,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix, ModelError> {
        let (dtype, data) = self.data(tensor, &[rows, columns])?;
        Ok(match dtype {
            GgmlDType::Q8_0 => Matrix::from_q8_0(data, columns),
            GgmlDType::Q4_0 => Matrix::from_q4_0(data, columns),
            GgmlDType::Q4_1 => Matrix::from_q4_1(data, columns),
            _ => Matrix::from_f32(&self.widen(tensor, dtype, data)?, columns),
        })
    }

    fn widen(&self, tensor: &str, dtype: GgmlDType, data: &[u8]) -> Result<Vec<f32>, ModelError> {
        if dtype == GgmlDType::F32 {
            let (values, _) = data.as_chunks::<4>();
            return Ok(values.iter().copied().map(f32::from_le_bytes).collect());
        }
        self.info(tensor)?
            .read(
                &mut Cursor::new(self.bytes),
                self.content.tensor_data_offset,
                &Device::Cpu,
            )
            .and_then(|tensor| tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1())
            .map_err(|error| {
                self.malformed(tensor, format!("cannot be read as {dtype:?}: {error}"))
            })
    }
}

pub(super) fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::U8(number) => Some(i64::from(*number)),
        Value::I8(number) => Some(i64::from(*number)),
        Value::U16(number) => Some(i64::from(*number)),
        Value::I16(number) => Some(i64::from(*number)),
        Value::U32(number) => Some(i64::from(*number)),
        Value::I32(number) => Some(i64::from(*number)),
        Value::U64(number) => i64::try_from(*number).ok(),
        Value::I64(number) => Some(*number),
        _ => None,
    }
}
