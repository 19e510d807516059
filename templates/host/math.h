// What kernels use of <math.h>. The C library's is more text than a kernel, which is why this comes before it on the path. Whoever
// includes <cmath> in a kernel, for a look at something, gets the C library's as well.
#pragma once

#define INFINITY __builtin_inff()

extern "C" {
float copysignf(float, float) noexcept;
float exp2f(float) noexcept;
float expf(float) noexcept;
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
}

inline bool isinf(float value) { return __builtin_isinf(value); }
