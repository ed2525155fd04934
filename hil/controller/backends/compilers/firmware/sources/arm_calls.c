// Functions for double and 64-bit arithmetic, by the names and with the calling convention of IREE's object files.
//
// IREE calls them with floating-point registers. The functions of Arm's run-time ABI, which each of these calls, take
// the values in integer registers.
#include <stdint.h>

double __extendsfdf2(float a) { return a; }
float __truncdfsf2(double a) { return (float)a; }
double __adddf3(double a, double b) { return a + b; }
double __subdf3(double a, double b) { return a - b; }
double __muldf3(double a, double b) { return a * b; }
double __divdf3(double a, double b) { return a / b; }
int32_t __fixdfsi(double a) { return (int32_t)a; }
uint32_t __fixunsdfsi(double a) { return (uint32_t)a; }
int64_t __fixdfdi(double a) { return (int64_t)a; }
int64_t __fixsfdi(float a) { return (int64_t)a; }
uint64_t __fixunssfdi(float a) { return (uint64_t)a; }
double __floatsidf(int32_t a) { return a; }
double __floatunsidf(uint32_t a) { return a; }
double __floatdidf(int64_t a) { return (double)a; }
float __floatdisf(int64_t a) { return (float)a; }
float __floatundisf(uint64_t a) { return (float)a; }
// Comparisons: negative, zero or positive; unordered values compare as greater (le, lt, eq) or less (ge, gt).
int __ledf2(double a, double b) { return a < b ? -1 : a == b ? 0 : 1; }
int __ltdf2(double a, double b) { return a < b ? -1 : a == b ? 0 : 1; }
int __eqdf2(double a, double b) { return a == b ? 0 : 1; }
int __nedf2(double a, double b) { return a == b ? 0 : 1; }
int __gedf2(double a, double b) { return a > b ? 1 : a == b ? 0 : -1; }
int __gtdf2(double a, double b) { return a > b ? 1 : a == b ? 0 : -1; }
int __unorddf2(double a, double b) { return a != a || b != b; }
