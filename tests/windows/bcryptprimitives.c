/* A DLL of Windows that Wine 8 lacks. Programs in Rust import it, among them safetensors. */
#include <stddef.h>

unsigned char __stdcall SystemFunction036(void *, unsigned long); /* RtlGenRandom, in advapi32 */

__declspec(dllexport) int __stdcall ProcessPrng(unsigned char *bytes, size_t size);

int __stdcall ProcessPrng(unsigned char *bytes, size_t size) { return SystemFunction036(bytes, (unsigned long)size); }
