//! The part of a matrix that a tensor-parallel rank holds, decided by the module's name.
//!
//! | style | last part of the module's name |
//! | --- | --- |
//! | column: N is cut | `q_proj` `k_proj` `v_proj` `gate_proj` `up_proj` `w1` `w3` `q_b_proj` `kv_b_proj` `fc1` `lm_head` |
//! | row: K is cut | `o_proj` `down_proj` `w2` `out_proj` `fc2` |
//! | refused: the sizes of the merged matrices are unknown | `qkv_proj` `gate_up_proj` `query_key_value` `c_attn` `Wqkv` |
//! | whole on every rank | everything else |
//!
//! Where ranks outnumber key and value heads, heads repeat, as in upstream's merged projection.
//! Gate and up of w13 are cut separately; w2 is cut by rows. With expert parallelism each rank
//! holds whole experts.

use std::ops::Range;

/// One rank of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    /// Ranks in the group.
    pub size: usize,
    /// This rank.
    pub rank: usize,
}

impl Ranks {
    /// A group of one.
    pub const ONE: Self = Self { size: 1, rank: 0 };
}

/// How ranks share a dense layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// N is cut.
    Column,
    /// N is cut by key and value heads, which repeat where ranks outnumber them.
    KeyValue,
    /// K is cut.
    Row,
    /// Every rank has the whole matrix.
    Replicated,
    /// Several matrices in one tensor, of unknown sizes.
    Merged,
}

impl Style {
    /// The style of a module.
    pub fn of(module: &str) -> Self {
        match module.rsplit('.').next().unwrap_or(module) {
            "k_proj" | "v_proj" => Self::KeyValue,
            "q_proj" | "gate_proj" | "up_proj" | "w1" | "w3" | "q_b_proj" | "kv_b_proj" | "fc1"
            | "lm_head" => Self::Column,
            "o_proj" | "down_proj" | "w2" | "out_proj" | "fc2" => Self::Row,
            "qkv_proj" | "gate_up_proj" | "query_key_value" | "c_attn" | "Wqkv" => Self::Merged,
            _ => Self::Replicated,
        }
    }
}

/// This rank's part of `size`; an error unless the ranks divide it.
pub fn cut(what: &str, size: usize, ranks: Ranks) -> Result<Range<usize>, String> {
    if ranks.size == 0 || !size.is_multiple_of(ranks.size) {
        return Err(format!("{what} = {size} is not divisible by tp_size = {}", ranks.size));
    }
    let part = size / ranks.size;
    Ok(ranks.rank * part..(ranks.rank + 1) * part)
}

/// This rank's part of a key or value projection of `size` columns.
pub fn cut_heads(
    size: usize,
    kv_heads: Option<usize>,
    ranks: Ranks,
) -> Result<Range<usize>, String> {
    match kv_heads {
        Some(heads) if heads > 0 && heads < ranks.size => {
            if !ranks.size.is_multiple_of(heads) {
                let found = format!("tp_size = {}", ranks.size);
                return Err(format!("{found} is not divisible by num_key_value_heads = {heads}"));
            }
            let group = Ranks { size: heads, rank: ranks.rank / (ranks.size / heads) };
            cut("size_n", size, group)
        }
        _ => cut("size_n", size, ranks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_fewer_than_ranks_repeat() {
        let part = |rank| cut_heads(256, Some(2), Ranks { size: 4, rank }).unwrap();
        assert_eq!([part(0), part(1), part(2), part(3)], [0..128, 0..128, 128..256, 128..256]);
        assert_eq!(cut_heads(256, Some(8), Ranks { size: 4, rank: 3 }), Ok(192..256));
        assert!(cut_heads(256, Some(3), Ranks { size: 4, rank: 0 }).is_err());
    }

    #[test]
    fn names_decide() {
        assert_eq!(Style::of("model.layers.0.self_attn.k_proj"), Style::KeyValue);
        assert_eq!(Style::of("model.layers.0.mlp.down_proj"), Style::Row);
        assert_eq!(Style::of("model.layers.0.mlp.gate"), Style::Replicated);
        assert_eq!(Style::of("model.layers.0.self_attn.qkv_proj"), Style::Merged);
    }
}
