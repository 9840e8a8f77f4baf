// vectors.h: CUDA's vector types. Copying one is one access of its full width, as on a GPU; g++ by itself would split
// it into its members, and the modes that watch memory would see four accesses of 4 bytes.
#pragma once
#include <cstdint>
#include <type_traits>

namespace cuda_on_cpu {

#if defined(__x86_64__)
#define IN_FLOAT_REGISTER "+x"
#elif defined(__aarch64__)
#define IN_FLOAT_REGISTER "+w"
#else
#define IN_FLOAT_REGISTER "+m"
#endif

// The value, which g++ neither takes apart nor merges with what comes before or after (a * b + c into an fma).
template <class Value>
inline __attribute__((always_inline)) Value opaque(Value value) {
  if constexpr (std::is_integral_v<Value>) {
    asm("" : "+r"(value));
  } else {
    asm("" : IN_FLOAT_REGISTER(value));
  }
  return value;
}

typedef uint64_t Bits128 __attribute__((vector_size(16)));

template <class Vector>
inline __attribute__((always_inline)) void copy_whole(Vector* to, const Vector* from) {
  using Bits = std::conditional_t<sizeof(Vector) == 16, Bits128, uint64_t>;
  static_assert(sizeof(Vector) == sizeof(Bits));
  *reinterpret_cast<Bits*>(to) = opaque(*reinterpret_cast<const Bits*>(from));
}

#if defined(__SANITIZE_THREAD__)  // g++ defines it where it instruments memory accesses
#define COPIES_WHOLE(Vector)                               \
  Vector(const Vector& from) { copy_whole(this, &from); }  \
  Vector& operator=(const Vector& from) {                  \
    copy_whole(this, &from);                               \
    return *this;                                          \
  }
#else
#define COPIES_WHOLE(Vector)
#endif

template <class Scalar>
struct alignas(2 * sizeof(Scalar)) Vector2 {
  Scalar x, y;
  Vector2() = default;
  Vector2(Scalar x, Scalar y) : x(x), y(y) {}
  COPIES_WHOLE(Vector2)
};

template <class Scalar>
struct Vector3 {
  Scalar x, y, z;
};

template <class Scalar>
struct alignas(4 * sizeof(Scalar)) Vector4 {
  Scalar x, y, z, w;
  Vector4() = default;
  Vector4(Scalar x, Scalar y, Scalar z, Scalar w) : x(x), y(y), z(z), w(w) {}
  COPIES_WHOLE(Vector4)
};

}  // namespace cuda_on_cpu

#define VECTORS(name, Scalar)                                                               \
  using name##2 = cuda_on_cpu::Vector2<Scalar>;                                             \
  using name##3 = cuda_on_cpu::Vector3<Scalar>;                                             \
  using name##4 = cuda_on_cpu::Vector4<Scalar>;                                             \
  inline name##2 make_##name##2(Scalar x, Scalar y) { return {x, y}; }                      \
  inline name##3 make_##name##3(Scalar x, Scalar y, Scalar z) { return {x, y, z}; }         \
  inline name##4 make_##name##4(Scalar x, Scalar y, Scalar z, Scalar w) { return {x, y, z, w}; }

VECTORS(int, int)
VECTORS(uint, unsigned)
VECTORS(float, float)
