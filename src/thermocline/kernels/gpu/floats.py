"""fp16, bf16 and fp8 (e4m3) codes on a GPU: conversion on the bits of fp32, as `quantize/reference.py` defines."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode(x, STOCHASTIC: tl.constexpr, bits, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, TOP: tl.constexpr):
    """fp32 -> (sign, code without sign), nearest-even or with random bits."""
    raw = x.to(tl.uint32, bitcast=True)
    sign = raw >> 31
    field = (raw >> 23) & 0xFF
    exponent = tl.maximum(field, 1).to(tl.int32)
    significand = (raw & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0).to(tl.uint32)
    floor = tl.maximum(exponent, SMALLEST + 127)
    shift = tl.minimum(23 - MANTISSA + floor - exponent, 31).to(tl.uint32)
    one = tl.full(shift.shape, 1, tl.uint32)
    if STOCHASTIC:
        add = bits >> (32 - shift)
    else:
        add = (one << (shift - 1)) - 1 + ((significand >> shift) & 1)
    code = ((floor - SMALLEST - 127) << MANTISSA).to(tl.uint32) + ((significand + add) >> shift)
    return sign, tl.minimum(code, TOP)


@triton.jit
def encode_half(x, STOCHASTIC: tl.constexpr, bits, IS_BF16: tl.constexpr):
    """fp32 -> 16-bit code as uint32."""
    if IS_BF16:  # the upper half of fp32, so that carries propagate
        raw = x.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            add = bits >> 16
        else:
            add = ((raw >> 16) & 1) + 0x7FFF
        sign, code = raw >> 31, tl.minimum(((raw & 0x7FFFFFFF) + add) >> 16, 0x7F7F)
    else:
        sign, code = encode(x, STOCHASTIC, bits, 10, -14, 0x7BFF)
    return code | (sign << 15)


@triton.jit
def decode_half(code, IS_BF16: tl.constexpr):
    """16-bit code (uint32) -> fp32."""
    if IS_BF16:
        return (code << 16).to(tl.float32, bitcast=True)
    else:
        return code.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_fp8(code):
    """e4m3 code (uint32) -> fp32."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * 0.001953125
    value = tl.where(magnitude >= 8, normal, subnormal).to(tl.uint32, bitcast=True)
    return (value | ((code >> 7) << 31)).to(tl.float32, bitcast=True)
